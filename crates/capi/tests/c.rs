//! C programs against the headers and the library, on machines without a GPU.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of this build's library: beside the tests.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(tests.join("libonehop.so").is_file(), "no libonehop.so in {}", tests.display());
    tests
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compiles a program against headers and library; without a compiler, says so and returns `None`.
fn compile(compiler: &str, flags: &[&str], source: &Path) -> Option<PathBuf> {
    compile_as(&source.file_stem().unwrap().to_string_lossy(), compiler, flags, source)
}

/// As [`compile`], under another name, for sources that several tests compile at once.
fn compile_as(name: &str, compiler: &str, flags: &[&str], source: &Path) -> Option<PathBuf> {
    if Command::new(compiler).arg("--version").output().is_err() {
        // Not eprintln: it would be hidden when the test passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {compiler} is not installed");
        return None;
    }
    let (library, include) = (library(), top().join("include"));
    let program = library.join(format!("capi-{name}"));
    let output = Command::new(compiler)
        .args(flags)
        .args(["-Wall", "-Wextra", "-Werror", "-I"])
        .arg(include)
        .arg(source)
        .arg("-L")
        .arg(&library)
        .arg("-lonehop")
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// Runs it; returns whether it succeeded, and its output.
fn run(program: &Path, args: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(args).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn every_function_in_c() {
    let source = top().join("crates/capi/tests/programs/host.c");
    let Some(program) = compile("cc", &["-std=c99", "-pedantic"], &source) else { return };
    let (content, said) = run(&program, &[]);
    assert!(content && said == "all of it\n", "{said}");
}

#[test]
fn arrays_in_c() {
    let source = top().join("crates/capi/tests/programs/arrays.c");
    let Some(program) = compile("cc", &["-std=c99", "-pedantic"], &source) else { return };
    let (ended, said) = run(&program, &[]);
    assert!(ended && said == "all of it\n", "{said}");
}

#[test]
fn pages_in_c() {
    let source = top().join("crates/capi/tests/programs/pages.c");
    let Some(program) = compile("cc", &["-std=c99", "-pedantic"], &source) else { return };
    for folder in [Path::new("/dev/shm"), &std::env::temp_dir()] {
        let file = folder.join(format!("onehop-pages-c-{}", std::process::id()));
        let content: Vec<u8> = (0..1_u32 << 20).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
        std::fs::write(&file, &content).unwrap();
        let is_in_memory = if folder == Path::new("/dev/shm") { "1" } else { "0" };
        let (ended, said) = run(&program, &[file.to_str().unwrap(), is_in_memory]);
        std::fs::remove_file(&file).unwrap();
        assert!(ended && said == "all of it\n", "{said}");
    }
}

/// Runs one part of the program that calls every function at a process's start, end or fork.
fn at_edges(part: &str, says: &str) {
    let source = top().join("crates/capi/tests/programs/edges.c");
    let Some(program) = compile_as(&format!("edges-{part}"), "cc", &["-std=gnu11", "-pthread"], &source)
    else {
        return;
    };
    let (content, said) = run(&program, &[part]);
    assert!(content && said == says, "{said}");
}

#[test]
fn invalid_handles_are_errors() {
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

#[test]
fn closes_during_calls() {
    at_edges("closes", "all of it\n");
}

#[test]
fn samples_in_c() {
    let source = top().join("crates/capi/tests/programs/sdr.c");
    let Some(program) = compile("cc", &["-std=c99", "-pedantic"], &source) else { return };
    let (content, said) = run(&program, &[]);
    assert!(content && said == "all of it\n", "{said}");
}

#[test]
fn samples_in_threads() {
    let source = top().join("crates/capi/tests/programs/sdr_threads.c");
    let Some(program) = compile("cc", &["-std=gnu99", "-pthread"], &source) else { return };
    let (content, said) = run(&program, &[]);
    assert!(content && said == "nobody waited\n", "{said}");
}

#[test]
fn the_example_with_samples() {
    let source = top().join("examples/sdr/receive.c");
    let Some(program) = compile("cc", &["-std=c99", "-pedantic"], &source) else { return };
    let (content, said) = run(&program, &["sim:usdr?signal=counter&rate=20M", "emu", "50"]);
    assert!(
        content && said.contains("by cpu/direct, 32 buffers") && said.contains("the first is number 0 with"),
        "{said}"
    );
    assert!(said.contains(" samples delivered, "), "{said}");
    let (content, said) = run(&program, &["ffff:1f:1f.7", "emu"]);
    assert!(!content && said.contains("opening the board: ") && said.contains("ffff:1f:1f.7"), "{said}");
}

#[test]
fn the_example_in_cpp_without_a_gpu() {
    let source = top().join("examples/cuda/pointer_chase.cpp");
    let Some(program) = compile("c++", &["-std=c++17", "-pedantic"], &source) else { return };
    for drive in ["sim:mem:64M", "sim:mem:32M?lba=4096&mdts=1"] {
        let (content, said) = run(&program, &[drive]);
        assert!(content && said.contains("1 chains of 50 blocks each, all of them right"), "{said}");
    }
    // The chain does not fit.
    let (content, said) = run(&program, &["sim:mem:1M", "emu"]);
    assert!(!content && said.contains("writing block 2048: -6"), "{said}");
    let (content, said) = run(&program, &["sim:mem:64M", "0"]);
    assert!(!content, "{said}");
}

/// An ext4 image with a file `/m` in which no two blocks are equal, that file, and the image's blocks from 2 to 65.
/// Without mke2fs, says so and returns `None`.
fn image(name: &str) -> Option<[PathBuf; 3]> {
    let folder = library().join(format!("capi-image-{name}-{}", std::process::id()));
    let tree = folder.join("tree");
    std::fs::create_dir_all(&tree).unwrap();
    let (image, file, blocks) = (folder.join("drive.img"), tree.join("m"), folder.join("blocks"));
    let bytes = (0..700_001u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8);
    std::fs::write(&file, bytes.collect::<Vec<_>>()).unwrap();
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut make = Command::new("mke2fs");
    make.env("PATH", path).args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d"]);
    let Ok(made) = make.arg(&tree).arg(&image).arg("8M").output() else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: mke2fs is not installed");
        return None;
    };
    assert!(made.status.success(), "{made:?}");
    let all = std::fs::read(&image).unwrap();
    std::fs::write(&blocks, &all[1024..1024 + 64 * 512]).unwrap();
    Some([image, file, blocks])
}

/// Runs the program that loads from a drive by every route.
fn load_from(drive: &str, name: &str, files: &[PathBuf; 3]) {
    let source = top().join("crates/capi/tests/programs/transfer.c");
    let Some(program) = compile_as(&format!("transfer-{name}"), "cc", &["-std=c99", "-pedantic"], &source)
    else {
        return;
    };
    let [_, file, blocks] = files.each_ref().map(|path| path.to_str().unwrap());
    let (content, said) = run(&program, &[drive, "/m", file, blocks]);
    assert!(content && said == "all of it\n", "{said}");
}

#[test]
fn files_and_blocks_of_a_simulated_drive() {
    let Some(files) = image("sim") else { return };
    load_from(&format!("sim:{}", files[0].display()), "sim", &files);
    std::fs::remove_dir_all(files[0].parent().unwrap()).unwrap();
}

#[test]
fn files_and_blocks_of_a_drive_that_is_served() {
    use std::sync::atomic::{AtomicBool, Ordering};

    let Some(files) = image("served") else { return };
    // Socket paths must be short.
    let socket = std::env::temp_dir().join(format!("onehop-capi-{}.sock", std::process::id()));
    let sim = onehop_sim::open(files[0].to_str().unwrap()).unwrap();
    let nvme = onehop_vfio_user::Nvme::new(sim).unwrap();
    let function = onehop_vfio_user::Function::new(Box::new(nvme));
    let server = onehop_vfio_user::Server::bind(&socket).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&function, &|| stop.load(Ordering::SeqCst), &|_| ()));
        let loaded = std::panic::catch_unwind(|| {
            load_from(&format!("vfio-user:{}", socket.display()), "served", &files);
        });
        stop.store(true, Ordering::SeqCst);
        serving.join().unwrap().unwrap();
        if let Err(failed) = loaded {
            std::panic::resume_unwind(failed);
        }
    });
    std::fs::remove_dir_all(files[0].parent().unwrap()).unwrap();
}

/// The functions that a header declares.
fn declared(header: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(top().join("include/onehop").join(header)).unwrap();
    let mut code = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").unwrap().1;
    }
    code.push_str(rest);
    let before_paren =
        |part: &str| part.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().map(str::to_owned);
    code.split('(').filter_map(before_paren).filter(|name| name.starts_with("onehop_")).collect()
}

#[test]
fn headers_and_libraries_have_the_same_functions() {
    let read = |file: &&str| std::fs::read_to_string(top().join("crates/capi/src").join(file)).unwrap();
    let all = [
        (&["lib.rs", "array.rs", "transfer.rs", "pages.rs"][..], "onehop.h", 30),
        (&["sdr.rs"], "sdr.h", 12),
    ];
    for (files, header, least) in all {
        let source: String = files.iter().map(read).collect();
        let exported: BTreeSet<String> = source
            .lines()
            .filter_map(|line| line.split_once("extern \"C\" fn "))
            .map(|(_, rest)| rest.split('(').next().unwrap().to_owned())
            .collect();
        assert!(exported.len() >= least, "{exported:?}");
        assert_eq!(declared(header), exported);
    }

    let functions: BTreeSet<String> = onehop_device::LIBRARY_PTX
        .lines()
        .filter(|line| line.starts_with(".visible .func"))
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(_, name)| name.trim_end_matches('(').to_owned())
        .collect();
    assert_eq!(declared("device.h"), functions);
}

#[test]
fn the_library_stays_loaded() {
    let Ok(listed) = Command::new("readelf").arg("-dW").arg(library().join("libonehop.so")).output() else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: readelf is not installed");
        return;
    };
    let dynamic = String::from_utf8_lossy(&listed.stdout);
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn the_header_s_numbers_are_those_of_the_answers() {
    use onehop_proto::array::ArrayError;
    use onehop_proto::kernel::Answer;

    let text = std::fs::read_to_string(top().join("include/onehop/device.h")).unwrap();
    let codes = |name: &str| -> BTreeSet<i32> {
        let body = text.split_once(&format!("enum {name} {{")).unwrap().1.split_once("};").unwrap().0;
        let numbers = body.lines().filter_map(|line| line.split_once(" = "));
        numbers.map(|(_, number)| number.trim_end_matches(',').parse().unwrap()).collect()
    };
    let answers = (-100..=0).filter(|code| Answer::from_code(*code).is_some());
    assert_eq!(codes("onehop_answer"), answers.collect());
    let of_arrays = (-100..0).filter(|code| {
        ArrayError::from_code(*code).is_some_and(|error| !matches!(error, ArrayError::Read(_)))
    });
    // What only functions of the headers answer, and what is added to a write-back's result.
    let write_back = ArrayError::WriteBack(Answer::TimedOut).code() - Answer::TimedOut.code();
    assert_eq!(codes("onehop_array_answer"), of_arrays.chain([-57, -56, write_back]).collect());
    assert_eq!(onehop_proto::kernel::Command::BYTES, 64);
}
