"""Healthy: actor-critic on 512 environments that step together as tensors."""

import torch
from torch import nn
from torch.distributions import Normal

BF16 = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))


class Springs:
    def __init__(self, n):
        self.state = torch.randn(n, 8)

    def step(self, action):
        x, v = self.state.chunk(2, dim=1)
        v = 0.98 * v + 0.05 * (action - x)
        self.state = torch.cat([x + 0.05 * v, v], dim=1)
        return self.state, -x.square().sum(1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.mean, self.value = nn.Linear(256, 4), nn.Linear(256, 1)

    def forward(self, state):
        h = self.body(state)
        return Normal(self.mean(h), 0.3), self.value(h)[:, 0]


def rollout(env, agent, horizon=8):
    loss, state = torch.zeros(()), env.state
    for _ in range(horizon):
        policy, value = agent(state)
        action = policy.sample()
        state, reward = env.step(action)
        with torch.no_grad():
            advantage = reward + 0.99 * agent(state)[1] - value
        loss = loss - (policy.log_prob(action).sum(1) * advantage).mean() + (value - value.detach() - advantage).square().mean()
    return loss / horizon


def learn(updates):
    env, agent = Springs(512), ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, fused=True)
    for _ in range(updates):
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            loss = rollout(env, agent)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(60)
