"""Tests of the comparison that need neither a GPU nor torch: python3 -m unittest discover -s bench/peers"""

import argparse
import io
import json
import os
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree
from contextlib import redirect_stdout
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import digest
import gpu
import loaders
import measure
import pages
import plot
import results
import run
import table


def model(folder, shards=2):
    """A model of random bytes; gives the files."""
    files = []
    for shard in range(shards):
        sizes = {f"{shard}.a": 4096 * 5, f"{shard}.b": 30}
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, size in sizes.items():
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        files.append(os.path.join(folder, f"model-{shard}.safetensors"))
        with open(files[-1], "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text + os.urandom(at))
    return files


def loads(seconds, wrong=0, whole=2.0, size=8 << 30):
    """What measure.py prints, of loads of so many seconds."""
    kept = {"kept_gpu_bytes": 1 << 30, "kept_host_bytes": 0, "first_wrong": ["x"] if wrong else []}
    rows = [{"seconds": one, "bytes": size, "wrong": 0, **kept} for one in seconds]
    rows[-1]["wrong"] = wrong
    rows[0]["whole_seconds"] = whole
    return {"loads": rows, "version": "1.2"}


def document(*rounds, state="tmpfs"):
    conditions = {"commit": "c" * 40, "onehop": "onehop 0.1", "date": "2026-11-25 12:00 UTC", "command": "python3 run.py"}
    conditions |= {"seed": 7, "cpu": "a <CPU>", "cpus": 16, "memory_kib": 1 << 27, "gpu": "a GPU, 580", "kernel": "6.18"}
    runs = [{"round": i, "state": state, "references": {"copy_engine": 55.0 + i}, "loaders": one} for i, one in enumerate(rounds)]
    return {"onehop_peers": results.VERSION, "conditions": conditions, "runs": runs}


class PageCache(unittest.TestCase):
    def setUp(self):
        # Not in tmpfs, whose pages cannot be dropped.
        self.folder = tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(__file__)))
        self.addCleanup(self.folder.cleanup)
        self.files = model(self.folder.name)

    def test_it_is_brought_into_the_state_and_asked(self):
        self.assertEqual(pages.prepare(self.files, "cached"), 1.0)
        self.assertEqual(pages.resident(self.files[0]), (6, 6))
        if pages.prepare(self.files, "cold") != 0.0:
            self.fail("pages are left")
        with open(self.files[0], "rb") as file:
            file.read(1)
        self.assertGreater(pages.share(self.files), 0.0)

    def test_pages_that_stay_are_no_cold_disk(self):
        pages.read(self.files)
        with mock.patch.object(pages, "drop"), mock.patch("time.sleep"):
            with self.assertRaisesRegex(pages.NotPrepared, "cold: 100.0000% of the files' pages are in memory"):
                pages.prepare(self.files, "cold")

    def test_a_folder_without_a_model_is_refused(self):
        self.assertEqual(pages.model_files(self.folder.name), self.files)
        with tempfile.TemporaryDirectory() as empty, self.assertRaisesRegex(pages.NotPrepared, "no .*safetensors"):
            pages.model_files(empty)


class Tensor:
    """As much of torch's as measure.py uses, over host memory."""

    def __init__(self, memory):
        self.memory = memory

    def detach(self):
        return self

    def view(self, _):
        return self

    def fill_(self, value):
        self.memory[:] = bytes([value]) * len(self.memory)

    def numel(self):
        return len(self.memory)

    def element_size(self):
        return 1


class OneProcess(unittest.TestCase):
    """measure.measure with a loader of our own, and a torch that does nothing."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.files = model(folder.name)
        cuda = types.SimpleNamespace(
            init=mock.Mock(), synchronize=mock.Mock(), empty_cache=mock.Mock(), mem_get_info=lambda: (1 << 30, 1 << 31)
        )
        torch = types.SimpleNamespace(cuda=cuda, zeros=mock.Mock(), uint8=None, __version__="2", version=mock.Mock(cuda="13"))
        self.expected = os.path.join(folder.name, "expected")
        with open(self.expected, "w") as out:
            json.dump({"digests": {name: self.bytes(*place).hex() for name, place in self.places().items()}}, out)
        for patch in (
            mock.patch.dict(sys.modules, {"torch": torch}),
            mock.patch.object(digest, "digest", lambda tensor: bytes(tensor.memory).hex()),
            mock.patch.object(gpu, "overwrite_free_memory", lambda: 5),
            mock.patch.object(measure, "PAUSE", 0),
            mock.patch("importlib.metadata.version", lambda _: "1.0"),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.args = argparse.Namespace(
            what="fake", model=folder.name, state="tmpfs", loads=3, expected=self.expected, started=0.0
        )

    def places(self):
        return {name: (file, at, size) for file, name, at, size in digest.headers(self.files)}

    def bytes(self, file, at, size):
        with open(file, "rb") as opened:
            opened.seek(at)
            return opened.read(size)

    def measured(self, load):
        fake = loaders.Loader("fake", "fake", ("tmpfs",), lambda: load)
        with mock.patch.dict(loaders.LOADERS, {"fake": fake}):
            return measure.measure(self.args)["loads"]

    def all(self):
        return {name: Tensor(bytearray(self.bytes(*place))) for name, place in self.places().items()}

    def test_right_bytes_are_right_and_the_first_load_has_the_whole_process(self):
        rows = self.measured(lambda files: (self.all(), None))
        self.assertEqual([row["wrong"] for row in rows], [0, 0, 0])
        self.assertEqual(["whole_seconds" in row for row in rows], [True, False, False])
        self.assertGreaterEqual(rows[0]["whole_seconds"], rows[0]["imports_seconds"] + rows[0]["seconds"])
        self.assertEqual(rows[0]["bytes"], 2 * (4096 * 5 + 30))

    def test_bytes_that_an_earlier_load_left_do_not_pass(self):
        kept = self.all()
        rows = self.measured(lambda files: (kept, None))
        self.assertEqual([row["wrong"] for row in rows], [0, 4, 4])

    def test_a_missing_tensor_is_wrong(self):
        rows = self.measured(lambda files: ({k: v for k, v in self.all().items() if k != "1.b"}, None))
        self.assertEqual(rows[0]["first_wrong"], ["1.b"])


class WholeRun(unittest.TestCase):
    """run.main with the processes replaced."""

    def run_with(self, more, crc="aabbccdd", route=None):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        model(folder.name)
        out, asked = os.path.join(folder.name, "out.json"), []

        def child(args, timeout):
            asked.append(args[0])
            if args[0] == "expected":
                return {"digests": {}}
            if args[0] == "references":
                return {"copy_engine": 55.0}
            if args[0] == "runai":
                raise run.Failed("No module named 'runai_model_streamer'")
            return loads([0.2, 0.1, 0.1])

        def of_program(program, args, timeout):
            if "--plan" in args:
                return {"arena": [{"name": "0.a"}]}, 0.1
            asked.append("program")
            document = {"seconds": 0.2, "bytes": 8 << 30, "crc32c": crc, "route": route or "cpu/cached", "route_why": ""}
            return document, 0.9

        command = ["run.py", "--program", "/bin/true", "--tmpfs", folder.name, "--out", out, *more]
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch.object(run, "child", child),
            mock.patch.object(run, "of_program", of_program),
            mock.patch.object(digest, "crc32c", lambda files, order: "aabbccdd"),
            mock.patch.object(gpu, "overwrite_free_memory", lambda: asked.append("overwritten")),
            redirect_stdout(io.StringIO()) as said,
        ):
            run.main()
        with open(out) as file:
            return json.load(file), asked, said.getvalue()

    def test_the_document_has_what_it_takes_to_repeat_it(self):
        document, asked, said = self.run_with(["--seed", "5"])
        conditions = document["conditions"]
        for name in ("commit", "date", "command", "cpu", "cpus", "gpu", "kernel", "seed"):
            self.assertTrue(conditions[name], name)
        self.assertIn('"seed": 5', said)
        self.assertEqual(len(document["runs"]), 2)
        for one in document["runs"]:
            self.assertEqual(set(one["loaders"]), {n for n, l in loaders.ALL.items() if "tmpfs" in l.states})
            self.assertEqual(one["loaders"]["onehop"]["loads"][0]["resident"], 1.0)
        # GPU memory is overwritten before every process that loads.
        for i, what in enumerate(asked):
            if what in loaders.ALL:
                self.assertEqual(asked[i - 1], "overwritten", asked)

    def test_the_commit_is_that_of_the_program(self):
        self.assertEqual(run.commit_of("onehop 0.1.0 (108e80b8ddec)"), "108e80b8ddec")
        self.assertEqual(run.commit_of("onehop 0.1.0"), "unknown")

    def test_the_order_is_random_and_the_seed_repeats_it(self):
        orders = [[list(one["loaders"]) for one in self.run_with(["--seed", seed])[0]["runs"]] for seed in "556"]
        self.assertEqual(orders[0], orders[1])
        self.assertNotEqual(orders[0], orders[2])
        self.assertNotEqual(orders[0][0], orders[0][1])

    def test_the_commands_timed_loads_are_checked_too(self):
        right, _, _ = self.run_with(["--only", "program"])
        _, found = results.by_state(right)["tmpfs"]
        self.assertEqual((found[0].first.samples, found[0].whole.median), (6, 0.9))
        wrong, _, _ = self.run_with(["--only", "program"], crc="00000000")
        _, found = results.by_state(wrong)["tmpfs"]
        self.assertIsNone(found[0].first)
        self.assertIn("wrong bytes, first in the checksum", found[0].problems[0])

    def test_nothing_begins_after_the_budget(self):
        # The clock is read at the start, before the state, and before each of the loaders of one round.
        clock = [0.0, 1.0, 1.0] + [11.0] * 99
        with mock.patch.object(run.time, "monotonic", lambda: clock.pop(0)):
            document, asked, said = self.run_with(["--budget", "10", "--only", "onehop", "runai"])
        self.assertEqual([len(one["loaders"]) for one in document["runs"]], [1])
        self.assertEqual(asked.count("references"), 1)
        self.assertRegex(said, "  (onehop|runai): not run, --budget is over")
        self.assertIn("tmpfs, round 1: not run, --budget is over", said)


class Numbers(unittest.TestCase):
    def test_medians_of_even_counts_and_samples(self):
        self.assertEqual(results.number([4.0, 1.0, 3.0, 2.0]), results.Number(2.5, 1.0, 4.0, 4))
        self.assertIsNone(results.number([]))

    def test_first_and_later_loads_are_kept_apart(self):
        found = results.summary("onehop", [loads([0.4, 0.2, 0.1], size=10**9), loads([0.2, 0.1, 0.1], size=10**9)])
        self.assertEqual((found.first.median, found.first.samples), (3.75, 2))
        self.assertEqual((found.later.median, found.later.samples, found.later.low), (10.0, 4, 5.0))

    def test_one_wrong_byte_voids_all_rounds(self):
        found = results.summary("onehop", [loads([0.2, 0.1]), loads([0.2, 0.1], wrong=1)])
        self.assertEqual((found.first, found.later, found.whole), (None, None, None))
        self.assertEqual(found.problems, ["wrong bytes, first in x"])

    def test_other_documents_are_refused(self):
        with self.assertRaises(ValueError):
            results.by_state({"runs": []})


class Shown(unittest.TestCase):
    def setUp(self):
        failed = {"error": "no <module>"}
        one = {"onehop": loads([0.2, 0.1]), "runai": failed, "program": loads([0.2, 0.2])}
        self.document = document(one, {"onehop": loads([0.3, 0.1]), "kvikio": loads([0.2, 0.1], wrong=1)})
        self.states = results.by_state(self.document)

    def test_the_table_says_everything(self):
        text = table.write(self.document, self.states, "history/raw/x.json")
        for words in (
            "**Commit:** ccccccc.",
            "2026-11-25 12:00 UTC",
            "`python3 run.py`",
            "seed 7",
            "[JSON](history/raw/x.json)",
            "| `onehop.torch.load_file` | 35.8 (28.6–42.9) | 2 | 85.9 (85.9–85.9) | 2 | 2.00 (2.00–2.00) | 2 |",
            "**Run:ai streamer**: no number: no <module>.",
            "**KvikIO, raw read**: no number: wrong bytes, first in x.",
            "the copy engine 55.5 (55.0–56.0) GB/s (2 runs)",
            "1.0 GiB of GPU",
            "Not run: InstantTensor,",
        ):
            self.assertIn(words, text)
        # The command is last, however fast by its own clock, and what has no number has an empty cell.
        self.assertIn("† | 42.9 (42.9–42.9) | 2 |  |  | 2.00 | 1 |\n\n- Reference", text)
        self.assertIn("| KvikIO, raw read  |  |  |  |  |  |  |", text)
        self.assertTrue(all(len(line) <= 100 for line in text.splitlines()))

    def test_the_picture_has_a_bar_for_each_number_and_none_without(self):
        root = xml.etree.ElementTree.fromstring(plot.draw(self.document, self.states))
        tags = [one.tag.split("}")[1] for one in root.iter()]
        # First and later loads of load_file; whole processes of it and the command, which has no bar beside the others.
        self.assertEqual(tags.count("rect"), 4)
        text = "".join(root.itertext())
        self.assertIn("35.8, n = 2", text)
        self.assertNotIn("KvikIO", text)
        self.assertEqual(text.count("onehop load"), 1)

    def test_steps_are_round(self):
        self.assertEqual([plot.step_of(most) for most in (3.1, 7.0, 55.0, 0.9)], [0.5, 1.0, 10.0, 0.2])


class Crc(unittest.TestCase):
    def test_it_follows_the_order_of_the_plan(self):
        try:
            import google_crc32c
        except ImportError:
            self.skipTest("google-crc32c is not installed")
        with tempfile.TemporaryDirectory() as folder:
            files = model(folder)
            places = {name: (file, at, size) for file, name, at, size in digest.headers(files)}
            order, whole = ["1.b", "0.a", "1.a", "0.b"], b""
            for name in order:
                file, at, size = places[name]
                with open(file, "rb") as opened:
                    whole += opened.read()[at : at + size]
            self.assertEqual(digest.crc32c(files, order), f"{google_crc32c.value(whole):08x}")
            self.assertNotEqual(digest.crc32c(files, order), digest.crc32c(files, sorted(order)))
            with self.assertRaises(ValueError):
                digest.crc32c(files, order[:3])


if __name__ == "__main__":
    unittest.main()
