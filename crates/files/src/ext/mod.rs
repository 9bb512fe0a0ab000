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

use crate::bytes::uuid_text;
use crate::extent::{Builder, Place};
use crate::volume::{Entry, File, FileKind, FileSystem, FsNode, foreign};
use crate::window::Window;
use crate::{Error, Extent, Result};
use features::{incompat, ro_compat};
use inode::{Inode, flag};
pub(crate) use superblock::probe;
use superblock::{Super, damaged};

const FS: &str = "ext4";
/// A link target is a path, and this is the kernel's limit for paths.
const LONGEST_LINK: u64 = 4096;

/// An ext2, ext3 or ext4 volume.
pub(crate) struct Ext {
    window: Window,
    sb: Super,
}

impl Ext {
    pub(crate) fn open(window: Window) -> Result<Self> {
        let sb = Super::read(&window)?;
        Ok(Self { window, sb })
    }

    /// Whether a link's target is stored in place of its block map.
    fn is_short_link(&self, inode: &Inode) -> bool {
        let attributes = if inode.has_attribute_block() { self.sb.cluster / 512 } else { 0 };
        // With attributes in inodes of their own, a link's block count includes them and so proves nothing.
        let alone = self.sb.incompat & incompat::EA_INODE != 0 || inode.sectors() <= attributes;
        !inode.has(flag::INLINE_DATA)
            && !inode.has(flag::EXTENTS)
            && inode.len < inode.block_area().len() as u64
            && alone
    }

    /// The extents of an inode.
    fn places(&self, inode: &Inode) -> Result<Vec<Extent>> {
        inode.refuse_encrypted()?;
        let mut out = Builder::new(FS, inode.len);
        if inode.has(flag::INLINE_DATA) {
            out.inline(self.inline(inode)?);
            return out.finish(true);
        }
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

    /// Byte of the drive at which a block begins.
    fn on_drive(&self, block: u64) -> u64 {
        self.window.start() + block * self.sb.block
    }

    /// Refuses blocks outside of the volume.
    fn check_blocks(&self, inode: &Inode, first: u64, len: u64) -> Result<()> {
        if first <= self.sb.first_block.into() || first + len > self.sb.blocks {
            return Err(damaged(format!("inode {} has {len} blocks at block {first}", inode.number)));
        }
        Ok(())
    }
}

fn number(node: &FsNode) -> Result<u32> {
    match node {
        FsNode::Ext(number) => Ok(*number),
        FsNode::Fat(_) => Err(foreign()),
    }
}

impl FileSystem for Ext {
    fn name(&self) -> &'static str {
        self.sb.name()
    }

    fn uuid(&self) -> String {
        uuid_text(&self.sb.uuid)
    }

    fn label(&self) -> String {
        self.sb.label.clone()
    }

    fn window(&self) -> &Window {
        &self.window
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    fn root(&self) -> FsNode {
        FsNode::Ext(inode::ROOT)
    }

    fn file(&self, node: &FsNode) -> Result<File> {
        let inode = self.inode(number(node)?)?;
        Ok(File::new(inode.kind, inode.id(), *node))
    }

    fn list(&self, dir: &FsNode) -> Result<Vec<Entry>> {
        let mut found = Vec::new();
        self.scan(&self.inode(number(dir)?)?, &mut |name| {
            let kind = match name.kind {
                Some(kind) => kind,
                None => self.inode(name.inode)?.kind,
            };
            found.push(Entry { name: name.bytes.into(), kind, node: FsNode::Ext(name.inode) });
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    fn find(&self, dir: &FsNode, wanted: &[u8]) -> Result<Option<FsNode>> {
        let dir = self.inode(number(dir)?)?;
        let mut found = None;
        self.scan(&dir, &mut |name| {
            if name.bytes == wanted {
                found = Some(FsNode::Ext(name.inode));
                return Ok(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        // An exact match holds under any folding. Without one, Unicode's tables would be needed.
        if found.is_none() && dir.has(flag::CASEFOLD) {
            return Err(Error::unsupported(
                "looking up a name in another case on ext4 (casefold)",
                format!("write `{}` as the directory has it", String::from_utf8_lossy(wanted)),
            ));
        }
        Ok(found)
    }

    fn extents(&self, node: &FsNode) -> Result<Vec<Extent>> {
        self.places(&self.inode(number(node)?)?)
    }

    fn read_link(&self, node: &FsNode) -> Result<Vec<u8>> {
        let inode = self.inode(number(node)?)?;
        if inode.len == 0 || inode.len >= LONGEST_LINK {
            return Err(damaged(format!("link {} has a target of {} bytes", inode.number, inode.len)));
        }
        inode.refuse_encrypted()?;
        if self.is_short_link(&inode) {
            return Ok(inode.block_area()[..inode.len as usize].to_vec());
        }
        let mut target = Vec::new();
        for extent in self.places(&inode)? {
            match extent.place {
                Place::Inline(bytes) => target.extend(bytes),
                Place::Drive(at) => {
                    target.extend(self.window.vec(at - self.window.start(), extent.len as usize)?)
                }
                Place::Zeros => return Err(damaged(format!("link {} has a hole", inode.number))),
            }
        }
        Ok(target)
    }
}

impl Super {
    /// Which of the three it is, by its features.
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
