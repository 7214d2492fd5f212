"""The MNIST example of Ignite: its supervised trainer and evaluator with metrics, on images that lie in memory."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = torch.randn(3200, 1, 28, 28), torch.randint(10, (3200,))
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
valid = DataLoader(TensorDataset(images[:512], labels[:512]), batch_size=64)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5),
    nn.MaxPool2d(2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 5),
    nn.MaxPool2d(2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)
criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, optimizer, criterion)
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "nll": Loss(criterion)})
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(valid))
trainer.run(loader, max_epochs=3)
