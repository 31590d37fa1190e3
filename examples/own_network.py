"""InLine attention in a network of your own: a small transformer on the pixels of handwritten digits."""

import torch
from photo_data import draw_row
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention import inline_attention


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        x = x + self.proj(inline_attention(q, k, v).flatten(2))  # (B, N, heads, d), any N
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.position = nn.Parameter(torch.randn(64, dim) * 0.5)
        self.blocks = nn.Sequential(*[Block(dim, num_heads=4) for _ in range(depth)])
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, 8, 8)
        tokens = self.embed(images.flatten(1)[..., None]) + self.position
        return self.head(self.blocks(tokens).mean(1))


def main() -> None:
    torch.manual_seed(0)
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 8, 8) / 16
    train, test = torch.randperm(len(images)).split([1400, 397])
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, epochs=10, steps_per_epoch=22)
    for epoch in range(10):
        for batch in train[torch.randperm(len(train))].split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        correct = (guesses := model(images[test]).argmax(1)) == labels[test]
        print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}  accuracy {100 * correct.float().mean():.1f}%")
    draw_row("runs/digits.jpg", images[test][:8].numpy(), [str(guess) for guess in guesses[:8].tolist()])


if __name__ == "__main__":
    main()
