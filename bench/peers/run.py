"""Measures model loaders beside each other on one GPU, every byte of every timed load checked.

    python3 run.py --program target/release/onehop --tmpfs /dev/shm/model --disk /data/model --out results.json

The models are directories of safetensors files (crates/load/examples/make_model makes them). States: "tmpfs" is the
model of --tmpfs; "cached" and "cold" are the model of --disk with all of its pages in the page cache, and with none:
mincore(2) is asked before every load. Each loader has a process of its own in each round, in random order. Its clock
begins with everything imported and CUDA up and ends when the last tensor is in GPU memory; the time from the start of
the process is taken beside. The command has a process for each load and a clock of its own; its whole process counts
until its exit. Needs torch, and google-crc32c for the command. Loaders that cannot run are named with the reason.
"""

import argparse
import datetime
import json
import os
import platform
import random
import re
import subprocess
import sys
import time

import digest
import gpu
import loaders
import pages
import results

HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    """A process of the measurement failed."""


def last_line(command, timeout):
    """Runs a command whose last line is JSON; gives that, when it was started and how long it took."""
    started = time.monotonic()
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {timeout} s") from None
    took = time.monotonic() - started
    lines = run.stdout.strip().splitlines()
    if run.returncode:
        said = run.stderr.strip().splitlines()
        raise Failed(said[-1] if said else f"exit {run.returncode}")
    return json.loads(lines[-1]), took


def child(args, timeout):
    # The time is taken as late as can be: what comes before belongs to nobody's load.
    command = [sys.executable, os.path.join(HERE, "measure.py"), *args]
    return last_line([*command, "--started", repr(time.monotonic())], timeout)[0]


def of_program(program, args, timeout):
    """What the command says, with --json: one document of many lines."""
    started = time.monotonic()
    try:
        run = subprocess.run([program, *args, "--json"], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {timeout} s") from None
    took = time.monotonic() - started
    document = json.loads(run.stdout)
    if run.returncode:
        raise Failed(document["error"]["message"])
    return document, took


def measured_loader(name, model, state, args, expected):
    more = ["--state", state, "--loads", str(args.loads), "--expected", expected]
    files = pages.model_files(model)
    gpu.overwrite_free_memory()
    resident = pages.prepare(files, state)
    found = child([name, model, *more], args.timeout)
    found["loads"][0]["resident"] = resident
    return found


def measured_command(name, model, state, args, wanted):
    """The same number of loads, each in a process of its own."""
    files, rows = pages.model_files(model), []
    route = loaders.COMMANDS[name].route
    for _ in range(args.loads):
        gpu.overwrite_free_memory()
        resident = pages.prepare(files, state)
        outcome, took = of_program(args.program, ["load", model, "--route", route, *args.device], args.timeout)
        same = outcome["crc32c"] == wanted
        row = {"seconds": outcome["seconds"], "whole_seconds": took, "bytes": outcome["bytes"], "resident": resident}
        row |= {"wrong": 0 if same else 1, "first_wrong": [] if same else ["the checksum of all tensors"]}
        rows.append(row | {"route": outcome["route"], "why": outcome["route_why"]})
    return {"loads": rows, "version": args.version}


def commit_of(version):
    """The commit in what `onehop --version` says: that of the program which is measured, not of this checkout."""
    found = re.search(r"\(([0-9a-f]{7,40})\b", version)
    return found[1] if found else "unknown"


def conditions(args):
    """What someone needs to judge the run, and to repeat it."""
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    with open("/proc/meminfo") as info:
        memory = info.readline().split()[1]
    return {
        "commit": args.commit or commit_of(args.version),
        "onehop": args.version,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([os.path.basename(sys.executable), *sys.argv]),
        "seed": args.seed,
        "cpu": names[0] if names else "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_kib": int(memory),
        "gpu": gpu.describe(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def tell(state, model, found):
    disk = ""
    if "disk" in found:
        disk = f", the disk past the page cache {found['disk']:.2f} GB/s by {found['disk_by']}"
    elif "disk_error" in found:
        disk = f", no reads past the page cache: {found['disk_error']}"
    print(f"\n{state}: {model}; reference: the copy engine {found['copy_engine']:.2f} GB/s{disk}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="the onehop binary")
    parser.add_argument("--tmpfs", help="a model's directory in tmpfs")
    parser.add_argument("--disk", help="a model's directory on a disk")
    parser.add_argument("--out", required=True)
    parser.add_argument("--loads", type=int, default=3, help="of a process; of the command as many processes")
    parser.add_argument("--only", nargs="*", choices=list(loaders.ALL), help="also in states not its own")
    parser.add_argument("--states", nargs="*", default=list(results.STATES), choices=list(results.STATES))
    parser.add_argument("--rounds", type=int, default=2, help="of all loaders in all states")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the order")
    parser.add_argument("--timeout", type=int, default=90, help="seconds of one process")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing begins; what runs then may take --timeout")
    parser.add_argument("--commit", help="of the onehop that is measured; without it what `onehop --version` says")
    parser.add_argument("--gpu", help="for `onehop load -g`; the Python loaders use the first GPU")
    args = parser.parse_args()
    args.device = ["-g", args.gpu] if args.gpu else []
    args.version = subprocess.run([args.program, "--version"], capture_output=True, text=True).stdout.strip()
    return args


def prepared(model, args, expected):
    """Writes what every loader has to bring into a file; gives the checksum of the command, or why there is none."""
    with open(expected, "w") as out:
        json.dump(child(["expected", model], 600), out)
    try:
        plan, _ = of_program(args.program, ["load", model, "--plan", *args.device], 60)
        return digest.crc32c(pages.model_files(model), [tensor["name"] for tensor in plan["arena"]])
    except (Failed, ImportError, ValueError) as error:
        return error


def measured(name, model, state, args, expected, crc):
    try:
        if name in loaders.LOADERS:
            return measured_loader(name, model, state, args, expected)
        if isinstance(crc, Exception):
            raise Failed(f"no checksum to compare with: {crc}")
        return measured_command(name, model, state, args, crc)
    except (Failed, pages.NotPrepared, gpu.GpuError, OSError) as error:
        return {"error": str(error)}


def save(document, path):
    with open(path, "w") as out:
        json.dump(document, out, indent=1)


def main():
    args = parse()
    began = time.monotonic()

    def over():
        return time.monotonic() - began > args.budget

    places = {"tmpfs": args.tmpfs, "cached": args.disk, "cold": args.disk}
    states = [(state, places[state]) for state in args.states if places[state]]
    order = random.Random(args.seed)
    document = {"onehop_peers": results.VERSION, "conditions": conditions(args), "runs": []}
    print(json.dumps(document["conditions"], indent=1), flush=True)
    known = {}
    for turn in range(args.rounds):
        for state, model in order.sample(states, len(states)):
            if over():
                print(f"\n{state}, round {turn}: not run, --budget is over", flush=True)
                continue
            if model not in known:
                expected = f"{args.out}.expected-{len(known)}"
                known[model] = (expected, prepared(model, args, expected))
            found = child(["references", model, "--state", state, "--seed", str(order.randrange(1 << 32))], 300)
            tell(state, model, found)
            names = args.only or [name for name, loader in loaders.ALL.items() if state in loader.states]
            run = {"round": turn, "state": state, "references": found, "loaders": {}}
            document["runs"].append(run)
            for name in order.sample(names, len(names)):
                if over():
                    print(f"  {name}: not run, --budget is over", flush=True)
                    continue
                one = run["loaders"][name] = measured(name, model, state, args, *known[model])
                print(f"  {name:24} {one.get('version', ''):12} {results.told(one)}", flush=True)
                save(document, args.out)
            save(document, args.out)
    for expected, _ in known.values():
        os.remove(expected)


if __name__ == "__main__":
    try:
        main()
    except (Failed, pages.NotPrepared) as error:
        sys.exit(f"{error}")
