//! Recognises other files in place of a model file by their first bytes, for a better error.

use crate::Result;
use crate::source::Source;

/// First bytes, and what they indicate.
const KINDS: [(&[u8], &str); 9] = [
    (
        b"version https://git-lfs.github.com/",
        "a pointer of Git LFS, not the file that it stands for; fetch that with 'git lfs pull'",
    ),
    (b"PK\x03\x04", "a ZIP archive, as torch.save writes it; convert it to safetensors"),
    (b"\x80\x02", "a pickle of Python, as old versions of torch.save wrote it; convert it to safetensors"),
    (b"\x89HDF", "an HDF5 file, as Keras writes it; convert it to safetensors"),
    (b"\x1f\x8b", "compressed by gzip; unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it"),
    (b"<", "a page of HTML or XML, perhaps a server's message in place of the file"),
    (b"{", "a text in JSON"),
    (b"ggml", "a GGML file from before GGUF; convert it with llama.cpp's tools"),
];

/// What `file` is, if it is one of these.
pub(super) fn kind(file: &dyn Source) -> Result<Option<&'static str>> {
    let mut first = [0; 40];
    let there = first.len().min(usize::try_from(file.bytes()).unwrap_or(usize::MAX));
    let first = first.get_mut(..there).unwrap_or_default();
    file.read_at(0, first)?;
    Ok(KINDS.iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, kind)| *kind))
}
