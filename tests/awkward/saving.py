"""A training that saves: torch.save and safetensors; with `--files` also a database, an open log, and a file put in another's place."""

import os
import sqlite3
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
files = "--files" in sys.argv
if files:
    database = sqlite3.connect("runs.db")
    database.execute("create table if not exists losses (step integer, loss real)")
step = 0
while True:
    loss = model(torch.ones(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.001)
    step += 1
    if step % 5 == 0:
        torch.save(model.state_dict(), "model.pt")
        save_file(model.state_dict(), "model.safetensors")
    if files and step % 5 == 0:
        database.execute("insert into losses values (?, ?)", (step, loss.item()))
        database.commit()
        with open("log.csv", "a") as log:
            log.write(f"{step},{loss.item()}\n")
        Path("best.tmp").write_text(str(step))
        os.replace("best.tmp", "model.best")
