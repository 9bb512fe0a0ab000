//! Gives the library the name inside by which programs that were linked with 3FS's look for it, and keeps it
//! loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhf3fs_api_shared.so");
    // Its handler for SIGBUS and its threads outlive every `dlopen` handle.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
