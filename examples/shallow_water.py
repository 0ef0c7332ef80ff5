"""A network that learns a solver: waves of shallow water on a plane without edges, sixteen steps of the solver at once.
Data: trajectories of the solver below, from hills of water at random places. A plan with `domain` cuts into tiles.

    python examples/shallow_water.py --plan domain=2x2
"""

import draw
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise import Task, train

ROWS, COLUMNS, LEAP, HELD_OUT = 36, 45, 16, range(48, 56)
G, DEPTH, CORIOLIS, DX, DT = 9.81, 10.0, 0.05, 1.0, 0.03  # m/s2, m, 1/s, m, s: waves go 0.3 cells in a step


def solve(state, steps):
    """(B, 3, H, W), the surface's height and both velocities on a C grid (Arakawa and Lamb 1977), some steps later."""
    h, u, v = state.unbind(1)
    for _ in range(steps):
        beside = (v + v.roll(-1, -1) + v.roll(1, -2) + v.roll((1, -1), (-2, -1))) / 4
        u = u + DT * (CORIOLIS * beside - G * (h.roll(-1, -1) - h) / DX)
        beside = (u + u.roll(1, -1) + u.roll(-1, -2) + u.roll((-1, 1), (-2, -1))) / 4
        v = v + DT * (-CORIOLIS * beside - G * (h.roll(-1, -2) - h) / DX)
        across = u * (DEPTH + (h + h.roll(-1, -1)) / 2)  # what flows through the cells' faces
        along = v * (DEPTH + (h + h.roll(-1, -2)) / 2)
        h = h - DT * (across - across.roll(1, -1) + along - along.roll(1, -2)) / DX
    return torch.stack([h, u, v], 1)


class Trajectories:
    """Pairs of states, `LEAP` steps of the solver apart."""

    global_shape = (ROWS, COLUMNS)  # asked for by region where a plan cuts space

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def read(self, indices, region=None):
        pairs = [self.pair(self.numbers[index]) for index in indices]
        inside = (..., *(slice(*ends) for ends in region or ()))
        return {"now": torch.stack([a for a, _ in pairs])[inside], "then": torch.stack([b for _, b in pairs])[inside]}

    def pair(self, number):
        draws = np.random.default_rng(number)
        y, x = np.mgrid[-18:18, -22:23]
        start = torch.zeros(1, 3, ROWS, COLUMNS)
        for _ in range(3):
            hill = draws.uniform(-1, 1) * np.exp(-(x**2 + y**2) / 18)
            start[0, 0] += torch.tensor(np.roll(hill, draws.integers(45, size=2), (0, 1)))
        state = solve(start, int(draws.integers(40)))
        return state[0], solve(state, LEAP)[0]


class Leap(nn.Module):
    """The state and what a convolutional network adds to it, which sees as far as a wave comes."""

    def __init__(self):
        super().__init__()
        options = {"padding": 4, "padding_mode": "circular"}
        self.net = nn.Sequential(nn.Conv2d(3, 24, 9, **options), nn.GELU(), nn.Conv2d(24, 3, 9, **options))

    def forward(self, now):
        return now + self.net(now)


def loss(output, batch):
    return (output - batch["then"]).square().sum(), float(output.numel())


def task():
    data = {"data": Trajectories(range(48)), "eval_data": Trajectories(HELD_OUT)}
    return Task(Leap, loss, inputs=lambda batch: ((batch["now"],), {}), name="shallow-water", **data)


def main(arguments=None):
    given = draw.asked(__doc__, 200, arguments)
    run = train(f"{__file__}:task", given.plan, steps=given.steps, out=str(given.out), batch_samples=8)
    model = Leap()
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    batch = Trajectories(HELD_OUT).read(range(8))
    now, then, guess = (x[:, 0].numpy() for x in (batch["now"], batch["then"], model(batch["now"]).detach()))
    scores = [((x - then) ** 2).mean() ** 0.5 for x in (guess, now)]
    title = f"RMSE of heights: network {scores[0]:.3f} m, no change {scores[1]:.3f} m"
    drawn = [draw.text(10, 20, title, 'font-weight="bold"')]
    panels = (("the solver, -0.5 to 0.5 m", then[0]), ("the network", guess[0]), ("its error", guess[0] - then[0]))
    for x, (name, values) in zip(range(10, 900, 240), panels, strict=False):
        drawn += [draw.text(x, 48, name), draw.pixels(x, 56, 225, 180, draw.shaded(values, -0.5, 0.5))]
    print(f"{run}\n{title}")
    draw.save(draw.sheet(drawn, 730, 250), given.out / "shallow_water.svg")


if __name__ == "__main__":
    main()
