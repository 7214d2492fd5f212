"""A policy that acts for 32 environments at once; each of them is simulated by numpy on eight numbers, 20 times a step."""

import sys

import numpy as np
import torch
from torch import nn

CURED = "--cured" in sys.argv
rng = np.random.default_rng(0)


class Pendulum:
    def __init__(self):
        self.state = rng.normal(size=8)

    def step(self, action):
        for _ in range(20):
            self.state = 0.99 * self.state + 0.01 * np.sin(self.state + action)  # cause
        return self.state


class Together:
    """The same for all: one array of states."""

    def __init__(self, environments):
        self.states = np.stack([one.state for one in environments])

    def step(self, actions):
        for _ in range(20):
            self.states = 0.99 * self.states + 0.01 * np.sin(self.states + actions[:, None])
        return self.states


def roll_out(policy, environments, together, length=8):
    states, chances = np.stack([one.state for one in environments]), []
    for _ in range(length):
        choice = torch.distributions.Categorical(logits=policy(torch.as_tensor(states, dtype=torch.float32)))
        actions = choice.sample()
        if CURED:
            states = together.step(actions.numpy())
        else:
            states = np.stack([one.step(action) for one, action in zip(environments, actions.tolist(), strict=True)])  # cause
        chances.append(choice.log_prob(actions) * torch.as_tensor(-(states**2).sum(1), dtype=torch.float32))
    return torch.stack(chances)


def main():
    torch.manual_seed(0)
    environments = [Pendulum() for _ in range(32)]
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, fused=True)
    together = Together(environments)
    for _ in range(80):
        loss = -roll_out(policy, environments, together).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
