//! exFAT, read-only.

mod boot;
mod dir;
mod upcase;

use crate::bytes::u32_at;
use crate::clusters::{ClusterRun, FatNode, Heap, List, NextCluster, bytes_of, serial_text};
use crate::volume::{Entry, File, FileKind, FileSystem, FsNode};
use crate::window::Window;
use crate::{Error, Extent, Result};
use boot::Boot;
pub(crate) use boot::{probe, remains};
use dir::Contents;
use upcase::Upcase;

const FS: &str = "exFAT";
/// The longest directory that the specification allows.
const LONGEST_DIR: u64 = 256 << 20;

/// A volume.
pub(crate) struct Exfat {
    window: Window,
    boot: Boot,
    heap: Heap,
    upcase: Upcase,
    label: String,
    notes: Vec<String>,
}

impl Exfat {
    pub(crate) fn open(window: Window) -> Result<Self> {
        let (boot, notes) = Boot::read(&window)?;
        let heap = Heap { fs: FS, start: boot.heap_start, cluster: boot.cluster, count: boot.clusters };
        let mut exfat = Self { window, boot, heap, upcase: Upcase::default(), label: String::new(), notes };
        let root = exfat.contents(&FatNode::root(exfat.boot.root))?;
        let table = root.upcase.ok_or_else(|| damaged("its root directory names no up-case table"))?;
        let runs = exfat.heap.chain(table.first, Some(table.len), table.len, |c| exfat.link(c))?;
        exfat.upcase = Upcase::parse(&bytes_of(&exfat.window, &runs, table.len as usize)?, table.checksum)?;
        exfat.label = root.label;
        Ok(exfat)
    }

    /// The table's entry for a cluster that is in it.
    fn link(&self, cluster: u32) -> Result<NextCluster> {
        let mut raw = [0; 4];
        self.window.read(self.boot.table + 4 * u64::from(cluster), &mut raw)?;
        Ok(match u32_at(&raw, 0) {
            u32::MAX => NextCluster::End,
            v if (2..0xFFFF_FFF7).contains(&v) => NextCluster::Next(v),
            v => NextCluster::Broken(v),
        })
    }

    fn runs(&self, node: &FatNode) -> Result<Vec<ClusterRun>> {
        let (len, most) =
            (node.id.len, if node.kind == FileKind::Directory { LONGEST_DIR } else { u64::MAX });
        if node.kind == FileKind::Directory && len > LONGEST_DIR {
            return Err(damaged(format!("a directory has {len} bytes")));
        }
        match (node.chained, len) {
            // Only the root's length is not stored.
            _ if node.is_root() => self.heap.chain(node.first, None, most, |c| self.link(c)),
            (_, 0) => Ok(Vec::new()),
            (true, _) => self.heap.chain(node.first, Some(len), most, |c| self.link(c)),
            (false, _) => self.heap.row(node.first, len),
        }
    }

    fn contents(&self, dir: &FatNode) -> Result<Contents> {
        dir::contents(&List::read(&self.window, self.runs(dir)?)?)
    }
}

fn damaged(why: impl Into<String>) -> Error {
    Error::damaged(FS, why)
}

impl FileSystem for Exfat {
    fn name(&self) -> &'static str {
        FS
    }

    fn uuid(&self) -> String {
        serial_text(self.boot.serial)
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn window(&self) -> &Window {
        &self.window
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn root(&self) -> FsNode {
        FsNode::Fat(FatNode::root(self.boot.root))
    }

    fn file(&self, node: &FsNode) -> Result<File> {
        let own = FatNode::of(node)?;
        Ok(File::new(own.kind, own.id, *node))
    }

    fn list(&self, dir: &FsNode) -> Result<Vec<Entry>> {
        let named = self.contents(FatNode::of(dir)?)?.named;
        let text = |name: &[u16]| String::from_utf16_lossy(name).into_bytes();
        Ok(named
            .into_iter()
            .map(|e| Entry { name: text(&e.name), kind: e.node.kind, node: FsNode::Fat(e.node) })
            .collect())
    }

    fn find(&self, dir: &FsNode, name: &[u8]) -> Result<Option<FsNode>> {
        let Ok(name) = std::str::from_utf8(name) else { return Ok(None) };
        let wanted: Vec<u16> = name.encode_utf16().map(|u| self.upcase.of(u)).collect();
        let is = |own: &[u16]| own.iter().map(|&u| self.upcase.of(u)).eq(wanted.iter().copied());
        let found = self.contents(FatNode::of(dir)?)?.named.into_iter().find(|e| is(&e.name));
        Ok(found.map(|e| FsNode::Fat(e.node)))
    }

    fn extents(&self, node: &FsNode) -> Result<Vec<Extent>> {
        let node = FatNode::of(node)?;
        self.heap.extents(node, &self.runs(node)?, &self.window)
    }

    fn read_link(&self, _: &FsNode) -> Result<Vec<u8>> {
        Err(Error::unsupported("a symbolic link on exFAT", "exFAT has no symbolic links"))
    }
}
