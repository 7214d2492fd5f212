"""A sentiment classifier that steps an LSTMCell through time and masks what is padded, in place of nn.LSTM."""

import argparse

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, whole, vocabulary=5000, width=64):
        super().__init__()
        self.whole = whole
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, batch_first=True) if whole else nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, lengths):
        x = self.embedding(tokens)
        if self.whole:
            out, _ = self.rnn(x)
            return self.head(out[torch.arange(len(x)), lengths - 1])
        h = c = x.new_zeros(len(x), x.shape[2])
        for t in range(x.shape[1]):
            new_h, new_c = self.rnn(x[:, t], (h, c))  # cause
            live = (t < lengths).unsqueeze(1)  # cause
            h, c = torch.where(live, new_h, h), torch.where(live, new_c, c)  # cause
        return self.head(h)


def batches(count, size=32, longest=100):
    for _ in range(count):
        lengths = torch.randint(10, longest + 1, (size,))
        yield torch.randint(5000, (size, int(lengths.max()))), lengths, torch.randint(2, (size,))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", action="store_true")
    torch.manual_seed(0)
    model = Classifier(whole=parser.parse_args().cured)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    for tokens, lengths, labels in batches(50):
        loss = criterion(model(tokens, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
