//! Programs for 3FS with the daemon: in C and Python, many at once, killed, and hostile.
#![allow(clippy::unwrap_used)]

mod attacks;
mod bed;
mod clock;
mod coherence;
mod death;
mod edges;
mod exhaustion;
mod hostile;
mod hung;
#[path = "../../../target/tests/service/hung_fs.rs"]
mod hung_fs;
mod locks;
mod many_groups;
mod mixed_io;
mod outages;
mod processes;
mod protections;
mod ranges;
mod reports;
mod rings;
mod silent;
mod stalled;
mod target;
mod users;

use std::process::{Command, Stdio};

use bed::{Bed, command, compile, run, skipped, top};

#[test]
fn every_function_in_c() {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("crates/hf3fs/tests/programs/calls.c") else { return };
    let mut calls = command(&program);
    calls.arg(bed.mount()).arg(bed.mount().join("folder"));
    assert_eq!(run(calls), "all of them\n");
    let report = bed.report();
    assert_eq!(report["broken_rings"], 0);
    // The routes that the bytes took.
    for (route, memory, direction) in [
        ("cpu/cached", "host", "read"),
        ("cpu/cached", "host", "write"),
        ("cpu/cached", "vram", "read"),
        ("cpu/cached", "vram", "write"),
        ("gpu/zeroed", "vram", "read"),
    ] {
        let known = report["routes"].as_array().unwrap().iter().any(|entry| {
            entry["route"] == route && entry["memory"] == memory && entry["direction"] == direction
        });
        assert!(known, "{route} {memory} {direction}: {report:#}");
    }
}

#[test]
fn the_four_snippets() {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("examples/3fs/gpu_available.c") else { return };
    assert_eq!(run(command(&program)), "GDR available with 1 GPUs\n");
    let mut off = command(&program);
    assert_eq!(off.env("HF3FS_GDR_ENABLED", "0").output().unwrap().status.code(), Some(3));
    for (name, wanted) in
        [("gpu_read", "in GPU memory"), ("gpu_wrap", "refused"), ("gpu_share", "another process")]
    {
        let program = compile(&format!("examples/3fs/{name}.c")).unwrap();
        for bytes in ["1", "4096", "6000011"] {
            let mut example = command(&program);
            example.arg(bed.mount()).arg(bed.file()).args([bytes, "0"]);
            let stdout = run(example);
            assert!(stdout.contains("all of them right") && stdout.contains(wanted), "{name}: {stdout}");
        }
    }
}

#[test]
fn every_round_of_a_rate_is_compared() {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("examples/3fs/gpu_rate.c") else { return };
    let mut rate = command(&program);
    rate.arg(bed.mount()).arg(bed.file()).args(["6000011", "0", "3", "2"]);
    let stdout = run(rate);
    assert_eq!(stdout.lines().filter(|line| line.starts_with("round ")).count(), 3 * 2, "{stdout}");
    assert!(stdout.ends_with("every byte of every round is right\n"), "{stdout}");
}

#[test]
fn as_fio_does() {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("crates/hf3fs/tests/programs/fio_like.c") else { return };
    let mut fio = command(&program);
    fio.arg(bed.mount()).arg(bed.file()).arg("500");
    assert!(run(fio).contains("16000 blocks, all of them right"));
}

#[test]
fn in_python() {
    let Some(bed) = Bed::start() else { return };
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("python3 is not installed");
    }
    let mut python = command("python3".as_ref());
    python.arg(top().join("examples/3fs/hf3fs_io.py")).arg(bed.mount()).arg(bed.file());
    assert!(run(python).contains("all of them right"));
}

#[test]
fn the_safetensors_reader_for_3fs() {
    let Some(bed) = Bed::start() else { return };
    let known = Command::new("python3").args(["-c", "import fastsafetensor_3fs_reader"]).output();
    if !known.is_ok_and(|output| output.status.success()) {
        return skipped("there is no fastsafetensor-3fs-reader for this Python (pip install it)");
    }
    let mut python = command("python3".as_ref());
    python
        .arg(top().join("crates/hf3fs/tests/programs/safetensors_reader.py"))
        .arg(bed.mount())
        .arg(bed.dir.join("root"));
    assert!(run(python).contains("all of them right"));
}

#[test]
fn two_hundred_programs_at_once() {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("crates/hf3fs/tests/programs/fio_like.c") else { return };
    let start = || {
        let mut fio = command(&program);
        fio.arg(bed.mount()).arg(bed.file()).arg("20").stdout(Stdio::piped()).stderr(Stdio::piped());
        fio.spawn().unwrap()
    };
    let children: Vec<_> = (0..200).map(|_| start()).collect();
    for child in children {
        let output = bed::wait(child);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    bed.until("all gone", |report| report["buffers"] == 0 && report["rings"] == 0);
}

#[test]
fn a_folder_s_files_through_the_kernel() {
    let Some(bed) = Bed::start() else { return };
    files_through_the_kernel(&bed);
}

fn files_through_the_kernel(bed: &Bed) {
    // A shell, because the process that serves a mount must not use it.
    let script = "set -e; cd \"$1\"; echo one >a; ln -s a link; ln a again; mkdir d; mv a d/b; test \"$(cat again)\" = one; \
                  test \"$(cat d/b)\" = one; test \"$(readlink link)\" = a; chmod 600 again; \
                  test \"$(stat -c %a again)\" = 600; truncate -s 100 again; test \"$(stat -c %s d/b)\" = 100; \
                  ls d | grep -qx b; rm d/b again link; rmdir d; test -z \"$(ls)\"; touch -d 2001-02-03 t; \
                  test \"$(date -r t +%Y)\" = 2001; rm t; ! mkdir ../3fs-virt/x 2>/dev/null; \
                  ! ln -s /etc/passwd ../3fs-virt/iovs/x 2>/dev/null; df . >/dev/null; cp ../file.bin c; \
                  cmp c ../file.bin; dd if=/dev/zero of=c bs=1000 count=3 conv=notrunc status=none; \
                  test \"$(stat -c %s c)\" = 6000011; rm c; echo fine";
    let mut shell = command("sh".as_ref());
    shell.args(["-c", script, "sh"]).arg(bed.mount().join("folder"));
    assert_eq!(run(shell), "fine\n");
    assert_eq!(std::fs::read_dir(bed.dir.join("root/folder")).unwrap().count(), 0);
}

#[test]
fn folders_that_cannot_be_served() {
    use onehop_serve::{Daemon, Error, MountOptions};
    let bed = Bed::folder();
    let (root, mount) = (bed.dir.join("root"), bed.dir.join("mnt"));
    for (point, root) in [
        (mount.join("nowhere"), root.clone()),
        (mount.clone(), root.join("nowhere")),
        (mount, root.join("file.bin")),
        (bed.dir.clone(), root),
    ] {
        let error = Daemon::start(MountOptions::new(&point, &root)).err().unwrap();
        assert!(matches!(error, Error::Folder { .. }), "{error}");
    }
}
