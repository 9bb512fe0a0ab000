//! Keeps the library loaded.

fn main() {
    // Its handler for SIGBUS and its threads outlive every `dlopen` handle.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
