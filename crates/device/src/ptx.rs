//! PTX as programs carry it.

use alloc::string::String;

use miniz_oxide::inflate::decompress_to_vec;

/// Kernels as PTX, deflated by the build: as text they would be an eighth of `onehop`.
#[derive(Clone, Copy)]
pub struct Ptx(pub(crate) &'static [u8]);

impl Ptx {
    /// The PTX.
    pub fn text(self) -> String {
        let text = decompress_to_vec(self.0).expect("the build deflated it");
        String::from_utf8(text).expect("the build deflated text")
    }
}
