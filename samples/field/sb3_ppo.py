"""PPO of Stable-Baselines3 with its own settings, on the pendulum of Gymnasium."""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
cured = parser.parse_args().cured
torch.set_num_threads(1)
environments = 16 if cured else 1
env = make_vec_env("Pendulum-v1", n_envs=environments, seed=0)
model = PPO("MlpPolicy", env, n_steps=2048 // environments, n_epochs=2, batch_size=256, seed=0, device="cpu")
model.learn(total_timesteps=6 * 2048)
