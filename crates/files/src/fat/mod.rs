//! FAT12, FAT16 and FAT32 with long names, read-only.

mod boot;
mod dir;

use crate::bytes::{u16_at, u32_at};
use crate::clusters::{ClusterRun, FatNode, Heap, List, NextCluster, serial_text};
use crate::volume::{Entry, File, FileKind, FileSystem, FsNode};
use crate::window::Window;
use crate::{Error, Extent, Result};
pub(crate) use boot::probe;
use boot::{Boot, Width};

/// The longest directory: 65536 entries.
const LONGEST_DIR: u64 = 2 << 20;

/// A FAT12, FAT16 or FAT32 volume.
pub(crate) struct Fat {
    window: Window,
    boot: Boot,
    heap: Heap,
}

impl Fat {
    pub(crate) fn open(window: Window) -> Result<Self> {
        let boot = Boot::read(&window)?;
        let heap =
            Heap { fs: boot.name(), start: boot.heap_start, cluster: boot.cluster, count: boot.clusters };
        Ok(Self { window, boot, heap })
    }

    /// The table's entry for a cluster that is in it.
    fn link(&self, cluster: u32) -> Result<NextCluster> {
        let (table, mut raw) = (self.boot.table, [0; 4]);
        let at = u64::from(cluster);
        let (value, most) = match self.boot.width {
            Width::W12 => {
                self.window.read(table + at + at / 2, &mut raw[..2])?;
                let pair = u16_at(&raw, 0);
                (if at % 2 == 1 { pair >> 4 } else { pair & 0xFFF }.into(), 0xFFF)
            }
            Width::W16 => {
                self.window.read(table + 2 * at, &mut raw[..2])?;
                (u16_at(&raw, 0).into(), 0xFFFF)
            }
            Width::W32 => {
                self.window.read(table + 4 * at, &mut raw)?;
                (u32_at(&raw, 0) & 0x0FFF_FFFF, 0x0FFF_FFFF)
            }
        };
        Ok(match value {
            v if v > most - 8 => NextCluster::End,
            v if v < 2 || v == most - 8 => NextCluster::Broken(v),
            v => NextCluster::Next(v),
        })
    }

    fn runs(&self, node: &FatNode) -> Result<Vec<ClusterRun>> {
        let link = |cluster| self.link(cluster);
        match (node.kind, node.id.len) {
            // FAT12 and FAT16 have a root of fixed size in front of the clusters.
            (FileKind::Directory, _) if node.is_root() && self.boot.width != Width::W32 => {
                Ok(vec![self.boot.root])
            }
            (FileKind::Directory, _) => self.heap.chain(node.first, None, LONGEST_DIR, link),
            (_, 0) => Ok(Vec::new()),
            (_, len) => self.heap.chain(node.first, Some(len), len, link),
        }
    }

    fn entries(&self, dir: &FsNode) -> Result<Vec<dir::FatEntry>> {
        let list = List::read(&self.window, self.runs(FatNode::of(dir)?)?)?;
        dir::entries(self.boot.name(), &list, self.boot.width == Width::W32)
    }
}

impl FileSystem for Fat {
    fn name(&self) -> &'static str {
        self.boot.name()
    }

    fn uuid(&self) -> String {
        serial_text(self.boot.serial)
    }

    fn label(&self) -> String {
        self.boot.label.clone()
    }

    fn window(&self) -> &Window {
        &self.window
    }

    fn notes(&self) -> Vec<String> {
        match self.boot.dirty {
            true => vec![format!("the {} volume was not unmounted; `fsck.fat` repairs it", self.name())],
            false => vec![],
        }
    }

    fn root(&self) -> FsNode {
        FsNode::Fat(FatNode::root(self.boot.root_cluster))
    }

    fn file(&self, node: &FsNode) -> Result<File> {
        let own = FatNode::of(node)?;
        Ok(File::new(own.kind, own.id, *node))
    }

    fn list(&self, dir: &FsNode) -> Result<Vec<Entry>> {
        let entries = self.entries(dir)?;
        Ok(entries
            .into_iter()
            .map(|e| Entry { kind: e.node.kind, name: e.name.into(), node: FsNode::Fat(e.node) })
            .collect())
    }

    fn find(&self, dir: &FsNode, name: &[u8]) -> Result<Option<FsNode>> {
        let Ok(name) = std::str::from_utf8(name) else { return Ok(None) };
        Ok(dir::find(self.boot.name(), &self.entries(dir)?, name)?.map(FsNode::Fat))
    }

    fn extents(&self, node: &FsNode) -> Result<Vec<Extent>> {
        let node = FatNode::of(node)?;
        self.heap.extents(node, &self.runs(node)?, &self.window)
    }

    fn read_link(&self, _: &FsNode) -> Result<Vec<u8>> {
        Err(Error::unsupported(format!("a symbolic link on {}", self.name()), "FAT has no symbolic links"))
    }
}
