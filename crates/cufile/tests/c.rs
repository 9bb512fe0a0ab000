//! C programs against the header and the library: without a GPU, and with a model of CUDA's driver.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The tests' programs, built once.
struct Made {
    folder: PathBuf,
}

fn run_compiler(arguments: &[&str]) {
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-O1", "-pthread"]).args(arguments);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The library under its usual name, the model, and the program; without a compiler, says so and returns `None`.
fn made() -> Option<&'static Made> {
    static MADE: OnceLock<Option<Made>> = OnceLock::new();
    let make = || {
        if Command::new("cc").arg("--version").output().is_err() {
            // Not eprintln: it would be hidden when the test passes.
            let _ = writeln!(std::io::stderr(), "SKIPPED: a C compiler (cc) is not installed");
            return None;
        }
        let top = Path::new(env!("CARGO_MANIFEST_DIR"));
        let tests = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let folder = tests.join(format!("cufile-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        for part in ["cufile", "model"] {
            std::fs::create_dir_all(folder.join(part)).unwrap();
        }
        let library = tests.join("libonehop_cufile.so");
        assert!(library.is_file(), "no {}", library.display());
        for name in ["libcufile.so.0", "libcufile.so"] {
            symlink(&library, folder.join("cufile").join(name)).unwrap();
        }
        let at = |path: &Path| path.to_str().unwrap().to_owned();
        let model = at(&folder.join("model/libcuda.so.1"));
        let source = at(&top.join("tests/programs/libcuda.c"));
        run_compiler(&["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", &model, &source]);
        for name in ["libcuda.so", "libnvidia-ml.so.1"] {
            symlink(&model, folder.join("model").join(name)).unwrap();
        }
        let (include, cufile) = (at(&top.join("../../include")), at(&folder.join("cufile")));
        for program in ["calls", "edges", "streams", "hostile"] {
            let source = at(&top.join(format!("tests/programs/{program}.c")));
            let to = at(&folder.join(program));
            run_compiler(&["-std=gnu11", "-I", &include, &source, "-L", &cufile, "-lcufile", "-o", &to]);
        }
        Some(Made { folder })
    };
    MADE.get_or_init(make).as_ref()
}

/// Runs a program, with or without the model; returns whether it succeeded, and its output.
fn run(program: &[&str], has_gpu: bool, variables: &[(&str, &str)]) -> Option<(String, bool)> {
    let Made { folder } = made()?;
    let (cufile, model) = (folder.join("cufile"), folder.join("model"));
    let (name, arguments) = program.split_first()?;
    let mut command = Command::new(folder.join(name));
    command.env("CUFILE_ENV_PATH_JSON", "").env("CUFILE_LOGFILE_PATH", folder.join("log"));
    command.args(arguments).current_dir(folder).envs(variables.iter().copied());
    if has_gpu {
        command.env("LD_LIBRARY_PATH", format!("{}:{}", cufile.display(), model.display()));
        command.env("LD_PRELOAD", model.join("libcuda.so.1"));
    } else {
        command.env("LD_LIBRARY_PATH", &cufile);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Some((said, output.status.success()))
}

fn passes(part: &str, has_gpu: bool) {
    let Some((said, is_content)) = run(&["calls", part], has_gpu, &[]) else { return };
    assert!(is_content && said.ends_with("all of it\n"), "{part}: {said}");
}

/// `ONEHOP_TEST_HOSTILE_SECONDS` makes it run longer, with other seeds.
#[test]
fn invalid_calls() {
    let wanted = std::env::var("ONEHOP_TEST_HOSTILE_SECONDS").ok();
    let seconds: u64 = wanted.and_then(|text| text.parse().ok()).unwrap_or(4);
    for (round, has_gpu) in (0..seconds.div_ceil(2)).zip([true, false].into_iter().cycle()) {
        let seed = if seconds > 4 { u64::from(std::process::id()) + round } else { round + 1 }.to_string();
        let Some((said, is_content)) = run(&["hostile", &seed, "2"], has_gpu, &[]) else { return };
        assert!(is_content && said.ends_with("all of it\n"), "seed {seed}, GPU {has_gpu}: {said}");
    }
}

#[test]
fn driver_and_parameters() {
    passes("driver", false);
    passes("driver", true);
}

#[test]
fn files_and_buffers() {
    passes("files", false);
    passes("files", true);
}

#[test]
fn host_memory() {
    passes("host", false);
    passes("host", true);
}

#[test]
fn gpu_memory() {
    passes("gpu", true);
}

#[test]
fn memory_that_is_freed_during_a_read() {
    passes("freed", true);
}

#[test]
fn threads() {
    passes("threads", true);
}

#[test]
fn batches() {
    passes("batch", true);
}

/// Runs one part of the program that calls every function at a process's start, end or fork. It logs to stderr.
fn at_edges(part: &str, says: &str) {
    let log = [("CUFILE_LOGFILE_PATH", ""), ("CUFILE_LOGGING_LEVEL", "INFO")];
    for has_gpu in [false, true] {
        let Some((said, is_content)) = run(&["edges", part], has_gpu, &log) else { return };
        let (logged, own): (Vec<_>, Vec<_>) =
            said.lines().partition(|line| line.starts_with("onehop cufile["));
        assert!(is_content && own == says.lines().collect::<Vec<_>>(), "GPU {has_gpu}: {own:?}");
        assert!(!logged.is_empty(), "nothing was logged");
    }
}

#[test]
fn invalid_handles_are_errors() {
    at_edges("handles", "all of it");
}

#[test]
fn calls_while_a_thread_ends() {
    at_edges("threads", "all of it");
}

#[test]
fn calls_while_the_process_ends() {
    at_edges("end", "all of it\nat exit\nat the end");
}

#[test]
fn host_memory_after_the_end_of_cuda() {
    let variables = [("MODEL_ENDS", "1"), ("CUFILE_LOGFILE_PATH", "")];
    let Some((said, is_content)) = run(&["edges", "outlives"], true, &variables) else { return };
    assert!(is_content && said.ends_with("all of it\nafter CUDA\n"), "{said}");
}

#[test]
fn calls_in_a_process_that_forks() {
    at_edges("forks", "all of it");
}

#[test]
fn closes_during_calls() {
    at_edges("closes", "all of it");
}

/// Runs parts of the program that puts operations into streams, on a GPU with this many channels for all its streams.
fn streams_pass(parts: &[&str], channels: &str) {
    let program: Vec<&str> = std::iter::once("streams").chain(parts.iter().copied()).collect();
    let variables = [("CUDA_DEVICE_MAX_CONNECTIONS", channels)];
    let Some((said, is_content)) = run(&program, true, &variables) else { return };
    assert!(is_content && said.ends_with("all of it\n"), "{parts:?}, {channels} channels: {said}");
}

#[test]
fn operations_in_streams_are_in_order_and_late() {
    for channels in ["8", "1", "32"] {
        streams_pass(&["late", "order", "beside"], channels);
    }
    streams_pass(&["many"], "8");
}

#[test]
fn operations_in_streams_move_every_byte() {
    streams_pass(&["sizes"], "8");
}

#[test]
fn operations_in_streams_that_fail_are_reported() {
    streams_pass(&["errors", "refused"], "8");
    let variables = [("CUFILE_LOGFILE_PATH", "streams-log"), ("CUFILE_LOGGING_LEVEL", "WARN")];
    let Some((said, is_content)) = run(&["streams", "ends", "cut"], true, &variables) else { return };
    assert!(is_content && said.ends_with("all of it\n"), "{said}");
    let log = made().map(|made| std::fs::read_to_string(made.folder.join("streams-log")).unwrap());
    let log = log.unwrap_or_default();
    for expected in [
        "WARN: an operation in a stream read 5000 of 41943040 bytes: there the file ends",
        "ERROR: an operation in a stream moved 5242880 of 16777216 bytes; the next call with its file fails",
    ] {
        assert!(log.contains(expected), "{log}");
    }
}

#[test]
fn operations_in_streams_that_the_program_holds_back() {
    streams_pass(&["waits"], "8");
    streams_pass(&["cold"], "1");
    streams_pass(&["full"], "8");
}

#[test]
fn statistics_and_routes() {
    passes("statistics", true);
}

#[test]
fn forks() {
    passes("forks", false);
    passes("forks", true);
}

#[test]
fn a_process_reports_its_route_at_its_end() {
    let report = [("ONEHOP_CUFILE_REPORT", "stderr")];
    let Some((said, is_content)) = run(&["calls", "statistics"], true, &report) else { return };
    let line = said.lines().find(|line| line.starts_with("onehop cufile["));
    assert!(
        is_content && line.is_some_and(|line| line.contains("route cpu/cached; 3 reads of 131072")),
        "{said}"
    );
}

/// As torch does.
#[test]
fn a_library_that_is_opened_by_its_path_is_replaced() {
    let Some(Made { folder, .. }) = made() else { return };
    let (other, program) = (folder.join("other"), folder.join("by-path"));
    std::fs::create_dir_all(&other).unwrap();
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    let (source, library) = (at(&folder.join("by-path.c")), at(&other.join("libcufile.so.0")));
    let stub = at(&folder.join("stub.c"));
    std::fs::write(&stub, "int cuFileGetVersion(int *out) { *out = 7; return 0; }").unwrap();
    run_compiler(&["-shared", "-fPIC", "-Wl,-soname,libcufile.so.0", "-o", &library, &stub]);
    let body = "#include <dlfcn.h>\n#include <stdio.h>\n#include \"onehop/cufile.h\"\n\
        int main(int count, char **names) {\n\
            char text[4096];\n\
            for (int i = 1; i < count; i++) {\n\
                void *opened = dlopen(names[i], RTLD_NOW);\n\
                int version = 0, (*get)(int *) = opened ? (int (*)(int *))dlsym(opened, \"cuFileGetVersion\") : 0;\n\
                if (get) get(&version);\n\
                printf(\"%d \", version);\n\
            }\n\
            onehop_cufile_route(0, text, sizeof text);\n\
            puts(text);\n\
        }\n";
    std::fs::write(&source, body).unwrap();
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include");
    let (include, cufile, program) = (at(&top), at(&folder.join("cufile")), at(&program));
    run_compiler(&["-std=gnu11", "-I", &include, &source, "-L", &cufile, "-lcufile", "-ldl", "-o", &program]);
    let own = at(&folder.join("cufile/libcufile.so.0"));
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(&program);
        command.args([&library, "libcufile.so.0", "libm.so.6"]).env("LD_LIBRARY_PATH", &cufile);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let plain = run(&[("LD_PRELOAD", &own)]);
    assert!(plain.starts_with("7 1170 0 {") && plain.contains("/other/libcufile.so.0\""), "{plain}");
    let audited = run(&[("LD_PRELOAD", &own), ("LD_AUDIT", &own)]);
    assert!(audited.starts_with("1170 1170 0 {") && audited.contains("\"other_library\":null"), "{audited}");
}

#[test]
fn the_library_has_the_name_and_every_function_of_the_header() {
    let Some(Made { folder, .. }) = made() else { return };
    let listed = |arguments: &[&str]| {
        let output =
            Command::new("readelf").args(arguments).arg(folder.join("cufile/libcufile.so.0")).output();
        output.ok().map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (Some(dynamic), Some(symbols)) = (listed(&["-dW"]), listed(&["--dyn-syms", "-W"])) else {
        let _ = writeln!(std::io::stderr(), "SKIPPED: readelf is not installed");
        return;
    };
    assert!(dynamic.contains("[libcufile.so.0]"), "{dynamic}");
    let header =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/onehop/cufile.h"));
    let header = header.unwrap();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let declared: Vec<&str> = header
        .lines()
        .filter(|line| !line.starts_with(' ') && line.contains('('))
        .filter_map(|line| line.split('(').next()?.rsplit(|c| !is_name(c)).next())
        .filter(|name| name.starts_with("cuFile") || name.starts_with("onehop_"))
        .collect();
    assert!(declared.len() > 45, "{declared:?}");
    let exported: Vec<&str> = symbols
        .lines()
        .filter(|line| line.contains(" FUNC "))
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    for name in &declared {
        assert!(exported.contains(name), "{name} is not exported");
    }
    for name in exported.iter().filter(|name| name.starts_with("cuFile")) {
        assert!(declared.contains(name), "{name} is not in the header");
    }
}
