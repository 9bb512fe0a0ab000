"""Measures model loaders beside each other on one GPU: each in a fresh process, first and second load, every byte checked.

    python3 run.py --program target/release/onehop --tmpfs /dev/shm/model --disk /data/model --out results.json

The models are directories of safetensors files (crates/load/examples/make_model makes them). States: "tmpfs" is the model of
--tmpfs; "cached" and "cold" are the model of --disk after it was read once, and after the kernel was asked to forget it before every
load. Time counts from when CUDA is up until the last tensor is in GPU memory. Loaders that are not installed are named with the reason.
"""

import argparse
import json
import os
import platform
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LOADERS = ["program", "cufile", "onehop", "instanttensor", "kvikio", "kvikio-direct"]
LOADERS += ["fastsafetensors", "fastsafetensors-cached", "runai", "safetensors"]


def child(args, timeout):
    command = [sys.executable, os.path.join(HERE, "measure.py"), *args]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout} s"}
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit {run.returncode}"}
    lines = run.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def needed(*args):
    """What nothing can be said without."""
    answer = child(args, 600)
    if answer and "error" in answer:
        sys.exit(f"{args[0]}: {answer['error']}")
    return answer


def rates(result):
    if "error" in result:
        return result["error"][:90]
    wrong = [row.get("first_wrong") for row in result["loads"] if row.get("wrong")]
    if wrong:
        return f"WRONG BYTES, first in {wrong[0]}: no figure"
    return "  ".join(f"{row['bytes'] / row['seconds'] / 1e9:6.2f}" for row in result["loads"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="the onehop binary")
    parser.add_argument("--tmpfs", help="a model's directory in tmpfs")
    parser.add_argument("--disk", help="a model's directory on a disk")
    parser.add_argument("--out", required=True)
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=LOADERS, choices=LOADERS)
    parser.add_argument("--states", nargs="*", default=["tmpfs", "cached", "cold"])
    parser.add_argument("--rounds", type=int, default=1, help="of all loaders in all states; a disk's speed changes by the minute")
    parser.add_argument("--timeout", type=int, default=90, help="seconds of one process")
    args = parser.parse_args()
    states = [("tmpfs", args.tmpfs)] if args.tmpfs else []
    states += [("cached", args.disk), ("cold", args.disk)] if args.disk else []
    states = [state for state in states if state[0] in args.states]
    results = {"machine": {"kernel": platform.release(), "processors": len(os.sched_getaffinity(0))}, "states": []}
    wanted, told = args.out + ".expected", None
    for turn, (state, model) in enumerate(states * args.rounds):
        # Whoever goes first finds the disk as nobody else does: each round begins with another.
        first = turn // len(states) % len(args.only)
        if model != told:
            with open(wanted, "w") as out:
                json.dump(needed("expected", model), out)
            told = model
        needed("drop" if state == "cold" else "read", model)
        limits = needed("ceilings", model, *(["--cold"] if state == "cold" else []))
        disk = ""
        if "disk" in limits:
            disk = f", disk past the cache {limits['disk']} GB/s by {limits['disk_by']} of {limits['disks']}"
        elif "disk_error" in limits:
            disk = f", no reads past the cache: {limits['disk_error']}"
        print(f"\n{state}: {model}; copy engine {limits['copy_engine']} GB/s{disk}", flush=True)
        rows = {}
        for loader in args.only[first:] + args.only[:first]:
            more = ["--expected", wanted, "--program", args.program, "--loads", str(args.loads)]
            more += ["--cold"] if state == "cold" else []
            if state == "cached":
                needed("read", model)
            rows[loader] = child([loader, model, *more], args.timeout)
            print(f"  {loader:16} {rows[loader].get('version', ''):10} GB/s: {rates(rows[loader])}", flush=True)
        results["states"].append({"state": state, "model": os.path.basename(model), "limits": limits, "loaders": rows})
        with open(args.out, "w") as out:
            json.dump(results, out, indent=1)
    if told:
        os.remove(wanted)


if __name__ == "__main__":
    main()
