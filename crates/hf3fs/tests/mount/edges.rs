//! Programs that call the library at the edges of their process, and with invalid structures.

use std::process::Command;

use crate::bed::{Bed, command, compile, library, run, skipped};

fn at_edges(what: &str, wanted: &str) {
    let Some(bed) = Bed::start() else { return };
    let Some(program) = compile("crates/hf3fs/tests/programs/edges.c") else { return };
    let mut edges = command(&program);
    edges.arg(what).arg(bed.mount()).arg(bed.file());
    assert_eq!(run(edges), wanted);
    bed.until("all gone", |report| report["buffers"] == 0 && report["rings"] == 0);
}

#[test]
fn the_library_stays_loaded() {
    let library = library().join("libhf3fs_api_shared.so");
    let Ok(listed) = Command::new("readelf").arg("-dW").arg(library).output() else {
        return skipped("readelf is not installed");
    };
    let dynamic = String::from_utf8_lossy(&listed.stdout);
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn structures_that_name_nothing_are_errors() {
    at_edges("handles", "all of it\n");
}

#[test]
fn calls_while_a_thread_ends() {
    at_edges("threads", "all of it\n");
}

#[test]
fn calls_while_the_process_ends() {
    at_edges("end", "all of it\nat exit\nat the end\n");
}

#[test]
fn calls_in_a_process_that_forks() {
    at_edges("forks", "all of it\n");
}
