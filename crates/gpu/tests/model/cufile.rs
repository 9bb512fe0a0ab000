//! cuFile, along with the driver.

use std::fs::File;
use std::sync::Arc;

use onehop_gpu::Emulated;

use super::*;

const LIBRARY: &str = include_str!("libcufile.c");

/// The driver's calls after one of cuFile change `errno`, too.
#[test]
fn errors_are_those_of_the_call_and_memory_is_the_gpu_s_own() {
    let test = "cufile::errors_are_those_of_the_call_and_memory_is_the_gpu_s_own";
    let Some(_model) = Model::or_child_with(test, &[("libcufile", LIBRARY)]) else { return };
    let cuda = Cuda::load().unwrap();
    let (gpu, other) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
    let files = gpu.files().unwrap();
    let file = files.open(Arc::new(File::open("/dev/null").unwrap())).unwrap();
    let memory = gpu.alloc(Place::Vram, 4096).unwrap();
    let failed = [file.read(&memory, 0), file.write(&memory, 0)].map(|moved| moved.unwrap_err().to_string());
    assert!(failed[0].contains("Input/output") && failed[1].contains("too large"), "{failed:?}");
    let foreign = [
        other.alloc(Place::Vram, 4096).unwrap(),
        gpu.alloc(Place::PinnedHost, 4096).unwrap(),
        Emulated::new().alloc(Place::Vram, 4096).unwrap(),
    ];
    for memory in &foreign {
        for refused in [file.read(memory, 0).err(), file.write(memory, 0).err(), files.register(memory).err()]
        {
            let why = refused.unwrap().to_string();
            assert!(why.contains("of another GPU"), "{memory:?}: {why}");
        }
    }
}
