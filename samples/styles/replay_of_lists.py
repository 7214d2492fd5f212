"""DQN: a batch is drawn from a deque of Python tuples, and tensors are made of lists of numpy rows and numbers."""

import random
import sys
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CURED = "--cured" in sys.argv


class Replay:
    def __init__(self, size=5000, width=64):
        rng = np.random.default_rng(0)
        self.states = torch.from_numpy(rng.standard_normal((size, width)).astype(np.float32))
        self.next = self.states.roll(-1, 0)
        self.actions, self.rewards = torch.randint(6, (size,)), torch.rand(size)
        columns = zip(self.states.tolist(), self.actions.tolist(), self.rewards.tolist(), self.next.numpy(), strict=True)
        self.memory = deque(columns, maxlen=size)

    def sample(self, n):
        if CURED:
            rows = torch.randint(len(self.states), (n,))
            return self.states[rows], self.actions[rows], self.rewards[rows], self.next[rows]
        states, actions, rewards, following = zip(*random.sample(self.memory, n), strict=True)  # cause
        return torch.tensor(states), torch.tensor(actions), torch.tensor(rewards), torch.tensor(following)  # cause


class Agent:
    def __init__(self):
        self.q, self.target = self.network(), self.network()
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-4, fused=True)

    def network(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 6))

    def learn(self, replay):
        states, actions, rewards, following = replay.sample(256)  # cause
        with torch.no_grad():
            wanted = rewards + 0.99 * self.target(following).max(1).values
        loss = F.smooth_l1_loss(self.q(states).gather(1, actions[:, None])[:, 0], wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


torch.manual_seed(0)
agent, replay = Agent(), Replay()
for frame in range(120):
    agent.learn(replay)
    if frame % 40 == 0:
        agent.target.load_state_dict(agent.q.state_dict())
