//! Sets the library's soname, by which programs look for cuFile.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    // Its threads, and functions that it has put into streams, outlive every `dlopen` handle.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
