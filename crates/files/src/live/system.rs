//! The parts of the system that are read: this machine's, or a recorded one's in tests.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onehop_os::DmTarget;

type DmTable = dyn Fn(u32, u32) -> onehop_os::Result<Vec<DmTarget>> + Send + Sync;

/// Paths of sysfs, procfs and `/dev`, and the source of device-mapper tables.
#[derive(Clone)]
pub struct System {
    pub(super) sysfs: PathBuf,
    pub(super) proc: PathBuf,
    dev: PathBuf,
    dm: Arc<DmTable>,
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sysfs, proc, dev, dm: _ } = self;
        f.debug_struct("System")
            .field("sysfs", sysfs)
            .field("proc", proc)
            .field("dev", dev)
            .finish_non_exhaustive()
    }
}

impl Default for System {
    fn default() -> Self {
        Self {
            sysfs: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
            dm: Arc::new(onehop_os::dm_table),
        }
    }
}

impl System {
    /// A recorded system: `sys`, `proc` and `dev` below `root`; a function returns device-mapper tables.
    pub fn recorded(
        root: impl AsRef<Path>,
        dm: impl Fn(u32, u32) -> onehop_os::Result<Vec<DmTarget>> + Send + Sync + 'static,
    ) -> Self {
        let root = root.as_ref();
        Self { sysfs: root.join("sys"), proc: root.join("proc"), dev: root.join("dev"), dm: Arc::new(dm) }
    }

    /// This system with another sysfs.
    #[must_use]
    pub fn with_sysfs(self, sysfs: impl Into<PathBuf>) -> Self {
        Self { sysfs: sysfs.into(), ..self }
    }

    pub(super) fn dm_table(&self, (major, minor): (u32, u32)) -> onehop_os::Result<Vec<DmTarget>> {
        (self.dm)(major, minor)
    }

    /// The kernel's name of a device; empty if it has none.
    pub(super) fn device_name(&self, (major, minor): (u32, u32)) -> String {
        let link = self.sysfs.join(format!("dev/block/{major}:{minor}"));
        let name = std::fs::canonicalize(link)
            .ok()
            .and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
        name.unwrap_or_default()
    }

    /// A file system's identifier from udev's links, for kernels that do not report it; empty if unknown.
    pub(super) fn uuid_by_link(&self, device: (u32, u32)) -> String {
        let name = self.device_name(device);
        let links = std::fs::read_dir(self.dev.join("disk/by-uuid")).into_iter().flatten().flatten();
        let leads = |link: &std::fs::DirEntry| {
            let target = std::fs::read_link(link.path()).ok();
            !name.is_empty() && target.is_some_and(|t| t.file_name().is_some_and(|n| *n == *name))
        };
        links
            .into_iter()
            .find(leads)
            .map_or_else(String::new, |l| l.file_name().to_string_lossy().into_owned())
    }
}
