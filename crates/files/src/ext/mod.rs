//! ext2, ext3 and ext4, read-only.

mod dir;
mod features;
mod group;
mod indirect;
mod inline;
mod inode;
mod superblock;
mod tree;

use std::ops::ControlFlow;

use crate::bytes::{text, uuid_text};
use crate::extent::{Builder, Place};
use crate::volume::{Entry, File, FileKind, Node};
use crate::window::Window;
use crate::{Error, Extent, Result};
use features::{incompat, ro_compat};
use inode::{Inode, flag};
pub(crate) use superblock::probe;
use superblock::{Super, damaged};

const FS: &str = "ext4";
/// A link target is a path: the kernel takes none that is longer.
const LONGEST_LINK: u64 = 4096;

/// A volume of one of the three.
pub(crate) struct Ext {
    window: Window,
    sb: Super,
}

impl Ext {
    pub(crate) fn open(window: Window) -> Result<Self> {
        let sb = Super::read(&window)?;
        Ok(Self { window, sb })
    }

    /// Which of the three it is, by what it can hold.
    pub(crate) fn name(&self) -> &'static str {
        self.sb.name()
    }

    pub(crate) fn uuid(&self) -> String {
        uuid_text(&self.sb.uuid)
    }

    pub(crate) fn label(&self) -> String {
        text(self.sb.label.as_bytes())
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    pub(crate) fn root(&self) -> Result<File> {
        self.file(inode::ROOT)
    }

    /// The file behind an inode number.
    pub(crate) fn file(&self, number: u32) -> Result<File> {
        let inode = self.inode(number)?;
        Ok(File::new(inode.kind, inode.id(), Node::Ext(number)))
    }

    pub(crate) fn list(&self, dir: u32) -> Result<Vec<Entry>> {
        let dir = self.inode(dir)?;
        let mut found = Vec::new();
        let mut broken = None;
        self.scan(&dir, &mut |name| {
            let kind = match name.kind {
                Some(kind) => Ok(kind),
                None => self.inode(name.inode).map(|i| i.kind),
            };
            match kind {
                Ok(kind) => found.push(Entry { name: name.bytes.into(), kind, node: Node::Ext(name.inode) }),
                Err(e) => broken = Some(e),
            }
            if broken.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        broken.map_or(Ok(found), Err)
    }

    /// The inode of a name. None where there is no such name.
    pub(crate) fn find(&self, dir: u32, wanted: &[u8]) -> Result<Option<u32>> {
        let dir = self.inode(dir)?;
        let mut found = None;
        self.scan(&dir, &mut |name| {
            if name.bytes == wanted {
                found = Some(name.inode);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
        // An exact match is one under any folding; without one, Unicode's tables would have to be asked.
        if found.is_none() && dir.has(flag::CASEFOLD) {
            return Err(Error::unsupported(
                "looking up a name in another case on ext4 (casefold)",
                format!("write `{}` as the directory has it", String::from_utf8_lossy(wanted)),
            ));
        }
        Ok(found)
    }

    pub(crate) fn file_extents(&self, number: u32) -> Result<Vec<Extent>> {
        self.extents(&self.inode(number)?)
    }

    pub(crate) fn read_link(&self, number: u32) -> Result<Vec<u8>> {
        let inode = self.inode(number)?;
        if inode.len == 0 || inode.len >= LONGEST_LINK {
            return Err(damaged(format!("link {number} has a target of {} bytes", inode.len)));
        }
        inode.refuse_transformed()?;
        if self.is_short_link(&inode) {
            return Ok(inode.block_area()[..inode.len as usize].to_vec());
        }
        let mut target = Vec::new();
        for extent in self.extents(&inode)? {
            match extent.place {
                Place::Inline(bytes) => target.extend(bytes),
                Place::Drive(at) => {
                    target.extend(self.window.vec(at - self.window.start(), extent.len as usize)?)
                }
                Place::Zeros => return Err(damaged(format!("link {number} has a hole"))),
            }
        }
        Ok(target)
    }

    /// Whether a link's target lies in place of its block map.
    fn is_short_link(&self, inode: &Inode) -> bool {
        let attributes = if inode.has_attribute_block() { self.sb.cluster / 512 } else { 0 };
        !inode.has(flag::INLINE_DATA)
            && !inode.has(flag::EXTENTS)
            && inode.len < inode.block_area().len() as u64
            && inode.sectors() <= attributes
    }

    /// Where the bytes of an inode are.
    fn extents(&self, inode: &Inode) -> Result<Vec<Extent>> {
        inode.refuse_transformed()?;
        if inode.has(flag::INLINE_DATA) {
            let (bytes, len) = (self.inline(inode)?, inode.len);
            return Ok(if len == 0 {
                vec![]
            } else {
                vec![Extent { offset: 0, len, place: Place::Inline(bytes) }]
            });
        }
        let mut out = Builder::new(FS, inode.len);
        if inode.has(flag::EXTENTS) {
            if inode.len > self.sb.block << 32 {
                return Err(damaged(format!("inode {} has {} bytes", inode.number, inode.len)));
            }
            self.tree(inode, &mut out)?;
        } else {
            self.map(inode, &mut out)?;
        }
        let may_share = self.sb.ro_compat & ro_compat::SHARED_BLOCKS != 0 && inode.kind == FileKind::File;
        out.finish(!may_share)
    }

    /// A block of metadata.
    fn block(&self, number: u64) -> Result<Vec<u8>> {
        self.window.vec(number * self.sb.block, self.sb.block as usize)
    }

    /// The byte of the drive that a block begins at.
    fn on_drive(&self, block: u64) -> u64 {
        self.window.start() + block * self.sb.block
    }

    /// Refuses blocks that no file can have.
    fn check_blocks(&self, inode: &Inode, first: u64, len: u64) -> Result<()> {
        if first <= self.sb.first_block.into() || first + len > self.sb.blocks {
            return Err(damaged(format!("inode {} has {len} blocks at block {first}", inode.number)));
        }
        Ok(())
    }
}

impl Super {
    fn name(&self) -> &'static str {
        use features::compat;
        let newer = incompat::EXTENTS | incompat::BITS64 | incompat::FLEX_BG | incompat::META_BG;
        match (self.incompat & newer, self.compat & compat::HAS_JOURNAL) {
            (0, 0) => "ext2",
            (0, _) => "ext3",
            _ => "ext4",
        }
    }

    fn filetype(&self) -> bool {
        self.incompat & incompat::FILETYPE != 0
    }

    fn large_dir(&self) -> bool {
        self.incompat & incompat::LARGE_DIR != 0
    }
}
