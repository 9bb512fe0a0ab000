//! Options for starting QEMU.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::files::Files;

/// The modelled drive. The default is one namespace of 64 MiB with blocks of 512 bytes.
#[derive(Clone, Debug)]
pub struct QemuOptions {
    /// QEMU's executable.
    pub program: PathBuf,
    /// Size of each namespace's image.
    pub disk_bytes: u64,
    /// An image for namespace 1 instead of an empty one. QEMU writes to it.
    pub image: Option<PathBuf>,
    /// Guest RAM, all of which can be mapped for the drive: whole pages, at most 2 GiB.
    pub ram_bytes: u64,
    /// Logical block size.
    pub lba: u32,
    /// Metadata bytes per block.
    pub ms: u16,
    /// Whether metadata follows each block's data instead of being in a separate buffer.
    pub extended: bool,
    /// Maximum transfer size (MDTS), as a power of two of 4 KiB pages; 0 is no limit.
    pub mdts: u8,
    /// I/O queue pairs.
    pub max_ioqpairs: u32,
    /// Controller memory buffer in MiB; 0 for none.
    pub cmb_mb: u32,
    /// Number of namespaces; they are numbered from 1.
    pub namespaces: u32,
    /// The drive's serial number.
    pub serial: String,
    /// More options of `-device nvme`: `legacy-cmb=on`; QEMU 9 has `mqes=63`.
    pub extra: Vec<String>,
    /// More arguments for QEMU.
    pub args: Vec<String>,
}

impl Default for QemuOptions {
    fn default() -> Self {
        Self {
            program: "qemu-system-x86_64".into(),
            disk_bytes: 64 << 20,
            image: None,
            ram_bytes: 64 << 20,
            lba: 512,
            ms: 0,
            extended: false,
            mdts: 7,
            max_ioqpairs: 64,
            cmb_mb: 0,
            namespaces: 1,
            serial: "QTEST0001".into(),
            extra: Vec::new(),
            args: Vec::new(),
        }
    }
}

impl QemuOptions {
    /// QEMU's arguments.
    pub(super) fn command_line(&self, files: &Files, images: &[PathBuf]) -> Vec<OsString> {
        let ram = self.ram_bytes;
        let mut args = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        add(&["-machine", "q35,memory-backend=m0", "-m", &format!("{ram}B"), "-accel", "tcg", "-S"]);
        add(&["-nodefaults", "-display", "none"]);
        let backend =
            format!("memory-backend-file,id=m0,size={ram}B,share=on,mem-path={}", quoted(&files.ram()));
        add(&["-object", &backend]);
        add(&["-device", &self.controller()]);
        for (index, image) in images.iter().enumerate() {
            let nsid = index + 1;
            add(&["-drive", &format!("file={},format=raw,if=none,id=ns{nsid}", quoted(image))]);
            add(&["-device", &self.namespace(nsid)]);
        }
        let socket = format!("unix:{},server=on,wait=off", quoted(&files.socket()));
        add(&["-qtest", &socket, "-qtest-log", "none"]);
        args.extend(self.args.iter().map(OsString::from));
        args
    }

    fn controller(&self) -> String {
        let mut device = format!(
            "nvme,id=nv0,serial={},mdts={},max_ioqpairs={},cmb_size_mb={}",
            self.serial, self.mdts, self.max_ioqpairs, self.cmb_mb
        );
        for option in &self.extra {
            device.push(',');
            device.push_str(option);
        }
        device
    }

    fn namespace(&self, nsid: usize) -> String {
        let (lba, ms, extended) = (self.lba, self.ms, u8::from(self.extended));
        format!(
            "nvme-ns,bus=nv0,drive=ns{nsid},nsid={nsid},logical_block_size={lba},physical_block_size={lba},ms={ms},\
             mset={extended}"
        )
    }
}

/// A path in QEMU's option syntax: a comma is doubled.
fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
