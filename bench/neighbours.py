"""Pages of a file beside the CUDA graphs of a neighbour in the same process: what both keep of their speed alone.

Needs torch, a GPU, and room for the file in /dev/shm. Prints a line for each size and direction.
"""

import argparse
import os
import statistics
import threading
import time

import torch

import onehop

#: The sizes of pages, and how many one call moves.
BATCHES = [(4096, 1024), (65536, 256), (1 << 20, 32)]


def neighbours():
    """Graphs of work that is bound by arithmetic, by memory, and by both."""

    def random(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    a, b, x, w, q = random(8192, 8192), random(8192, 8192), random(64, 8192), random(8192, 28672), random(1, 32, 4096, 128)
    attention = torch.nn.functional.scaled_dot_product_attention
    works = {"products": lambda: a @ b, "decode": lambda: x @ w, "attention": lambda: attention(q, q, q, is_causal=True)}
    graphs = {}
    for name, work in works.items():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(4):
                work()
    return graphs


def rate(graph, seconds):
    """Replays of a graph in a second, the median of three."""

    def once():
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            for _ in range(4):
                graph.replay()
            torch.cuda.current_stream().synchronize()
            count += 4
        return count / (time.perf_counter() - begun)

    return statistics.median(once() for _ in range(3))


class Mover(threading.Thread):
    """Moves pages at random places until it is stopped."""

    def __init__(self, pages, io, size, count):
        super().__init__()
        self.move, self.stopped, self.bytes = getattr(pages, io), threading.Event(), 0
        self.cache = torch.empty(count, size, dtype=torch.uint8, device="cuda")
        places = torch.stack([torch.randperm(pages.size // size)[:count] for _ in range(64)])
        self.places = (places * size).tolist()
        self.side = torch.cuda.Stream()

    def run(self):
        while not self.stopped.is_set():
            for places in self.places[:8]:
                self.move(self.cache, places, stream=self.side)
                self.bytes += self.cache.numel()

    def beside(self, work):
        """What `work` returns, and the rate of the pages meanwhile in GB/s."""
        begun = time.perf_counter()
        self.start()
        result = work()
        self.stopped.set()
        self.join()
        return result, self.bytes / (time.perf_counter() - begun) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="/dev/shm/onehop-neighbours", help="the file, which is removed afterwards")
    parser.add_argument("--gib", type=int, default=2, help="its size")
    parser.add_argument("--seconds", type=float, default=0.15, help="how long each of three rates is measured")
    args = parser.parse_args()
    try:
        graphs = neighbours()
        with onehop.Pages(args.path, device="cuda:0", create=args.gib << 30) as pages:
            print(f"registered {pages.register()} bytes")
            for size, count in BATCHES:
                for io in ("read", "write"):
                    _, alone = Mover(pages, io, size, count).beside(lambda: time.sleep(3 * args.seconds))
                    line = [f"{size >> 10} KiB, {count} in a call, {io}: alone {alone:.1f} GB/s"]
                    for name, graph in graphs.items():
                        before = rate(graph, args.seconds)
                        kept, moved = Mover(pages, io, size, count).beside(lambda: rate(graph, args.seconds))
                        line.append(f"{name} keeps {kept / before:.2f} beside {moved:.1f}")
                    print("; ".join(line), flush=True)
            print(f"moved: {pages.moved}")
    finally:
        if os.path.exists(args.path):
            os.unlink(args.path)


if __name__ == "__main__":
    main()
