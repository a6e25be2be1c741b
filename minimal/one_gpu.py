"""Train a small CNN on Fashion-MNIST with one GPU: python minimal/one_gpu.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import ToTensor


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train_set = datasets.FashionMNIST("data", train=True, transform=ToTensor(), download=True)
    test_set = datasets.FashionMNIST("data", train=False, transform=ToTensor(), download=True)
    options = {"num_workers": 4, "persistent_workers": True, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, batch_size=256, shuffle=True, drop_last=True, **options)
    test_loader = DataLoader(test_set, batch_size=256, **options)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(5):
        model.train()
        loss_sum = 0
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum().item()
        loss, accuracy = loss_sum / len(train_loader), correct / len(test_set)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
