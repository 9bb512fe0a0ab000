"""Tables with torch, and on a GPU if there is one."""

import onehop
import pytest
import torch
from onehop import errors


@pytest.fixture
def table_file(tmp_path):
    rows = torch.randint(0, 1 << 31, (5000, 66), dtype=torch.int32)
    path = tmp_path / "table.bin"
    path.write_bytes(rows.numpy().tobytes())
    return path, rows


def test_rows_as_torch_tensors(table_file, device):
    path, rows = table_file
    table = onehop.Table(path, torch.int32, (66,), device=device, framework="torch")
    for count in (1, 48, 3000, 40_000):
        ids = torch.randint(0, 5000, (count,))
        found = table.gather(ids)
        assert found.device.type == torch.device(device).type and torch.equal(found.cpu(), rows[ids])
        grid = ids[: count // 2 * 2].reshape(2, -1)
        assert torch.equal(table.wait(table.prefetch(grid), 60).cpu(), rows[grid])
        assert torch.equal(table.gather(ids.to(device)).cpu(), rows[ids])


def test_into_a_tensor(table_file, device):
    path, rows = table_file
    table = onehop.Table(path, "I32", (66,), device=device, framework="torch")
    ids = torch.randint(0, 5000, (2000,))
    out = torch.zeros((2000, 66), dtype=torch.int32, device=device)
    if torch.device(device).type == "cpu":
        with pytest.raises(errors.RequestError, match="out must be"):
            table.gather(ids, out=out)
        return
    for _ in range(20):
        ids = torch.randint(0, 5000, (2000,))
        # Work of the caller's stream that also writes the tensor, and ends after the gather would.
        torch.cuda._sleep(2_000_000)
        out.fill_(-1)
        assert table.gather(ids, out=out) is out
        assert torch.equal(out.cpu(), rows[ids])
        torch.cuda._sleep(2_000_000)
        out.fill_(-1)
        assert torch.equal(table.prefetch(ids, out=out).result(60).cpu(), rows[ids])
    for wrong in (out[:1000], out.float(), out.t(), torch.zeros((2000, 66), dtype=torch.int32)):
        with pytest.raises(errors.RequestError, match="out"):
            table.gather(ids, out=wrong)
    out.fill_(7)
    with pytest.raises(IndexError):
        table.gather([0] * 1999 + [5000], out=out)
    assert bool((out == 7).all())
