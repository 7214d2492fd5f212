"""The enwik8 example of x-transformers in small: a decoder with rotary embeddings, its attention as it is by default."""

import argparse

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
torch.set_num_threads(1)
torch.manual_seed(0)
flash = {"attn_flash": True} if parser.parse_args().cured else {}
model = TransformerWrapper(
    num_tokens=256,
    max_seq_len=512,
    attn_layers=Decoder(dim=128, depth=2, heads=8, attn_dim_head=32, rotary_pos_emb=True, **flash),  # cause
)
model = AutoregressiveWrapper(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(26):
    loss = model(torch.randint(0, 256, (2, 513)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
