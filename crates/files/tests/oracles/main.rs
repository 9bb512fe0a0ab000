//! What we read, against what others say: mke2fs, debugfs, dosfstools, mtools, exfatprogs, sgdisk, sfdisk, the kernel.
//!
//! Images are made at random; a failing test prints its seed, and `ONEHOP_FILES_SEED` gives it again.
//! `ONEHOP_FILES_LARGE=1` makes more and larger ones.

#![allow(clippy::unwrap_used)]

mod exfat;
#[allow(dead_code)]
#[path = "../common/exfat_image.rs"]
mod exfat_image;
mod ext;
mod ext_cases;
mod fat;
mod foreign;
mod kernel;
mod live;
mod members;
#[path = "../common/mounted.rs"]
mod mounted;
mod support;
#[allow(dead_code)]
#[path = "../common/table.rs"]
mod table;
mod tables;
