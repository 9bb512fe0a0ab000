//! Sets the soname, under which programs linked with 3FS's library look for it, and keeps the library loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhf3fs_api_shared.so");
    // Its SIGBUS handler and its threads outlive every `dlopen` handle.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
