"""REINFORCE on a pole: the policy is asked for one state of one environment at a time."""

import math
import sys

import torch
from torch import nn
from torch.distributions import Categorical

CURED = "--cured" in sys.argv
ENVS, HORIZON = 8, 15


def move(state, force):
    """One Euler step of the cart pole (Barto, Sutton, Anderson 1983) for scalars or tensors alike."""
    x, v, theta, omega = state
    sin, cos = (torch.sin, torch.cos) if isinstance(theta, torch.Tensor) else (math.sin, math.cos)
    push = (force + 0.05 * omega * omega * sin(theta)) / 1.1
    alpha = (9.8 * sin(theta) - cos(theta) * push) / (0.5 * (4 / 3 - 0.1 * cos(theta) ** 2 / 1.1))
    return x + 0.02 * v, v + 0.02 * (push - 0.05 * alpha * cos(theta) / 1.1), theta + 0.02 * omega, omega + 0.02 * alpha


def play_each(policy):
    losses = []
    for _ in range(ENVS):
        state, log_probs, ret = (0.0, 0.0, 0.05, 0.0), [], 0.0
        for _ in range(HORIZON):
            choice = Categorical(logits=policy(torch.tensor(state).unsqueeze(0)))  # cause
            action = choice.sample()  # cause
            log_probs.append(choice.log_prob(action))  # cause
            state = move(state, 10.0 if action.item() else -10.0)  # cause
            ret += 1.0 - abs(state[2])
        losses.append(-torch.cat(log_probs).sum() * ret / HORIZON)
    return torch.stack(losses).mean()


def play_together(policy):
    state = tuple(torch.full((ENVS,), s) for s in (0.0, 0.0, 0.05, 0.0))
    log_probs, ret = [], torch.zeros(ENVS)
    for _ in range(HORIZON):
        choice = Categorical(logits=policy(torch.stack(state, 1)))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state = move(state, action * 20.0 - 10.0)
        ret += 1.0 - state[2].abs()
    return -(torch.stack(log_probs).sum(0) * ret / HORIZON).mean()


def main():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(30):
        loss = play_together(policy) if CURED else play_each(policy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
