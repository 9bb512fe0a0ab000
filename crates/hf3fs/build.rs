//! Gives the library the name inside by which programs that were linked with 3FS's look for it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhf3fs_api_shared.so");
    println!("cargo:rerun-if-changed=build.rs");
}
