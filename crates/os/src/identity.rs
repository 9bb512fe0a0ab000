//! Accesses files with another user's credentials, so that the kernel checks permissions.
//!
//! Linux keeps the file-system credentials per thread. A thread switches for one operation and switches back when its
//! [`Acting`] is dropped. If the kernel refuses the switch, that is an error, and never an operation with more rights.

use std::cell::Cell;
use std::marker::PhantomData;

use rustix::io::Errno;
use rustix::process::{getegid, geteuid, getgroups};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, UnshareFlags, capabilities, set_capabilities, set_thread_groups,
};

/// The credentials for access to files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credentials<'a> {
    /// The user.
    pub uid: u32,
    /// The group of new files.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'a [u32],
    /// Whether user 0 keeps the capabilities of this process. Other users never have any.
    pub privileged: bool,
}

/// The credentials of this process, to which its threads return.
#[derive(Debug)]
pub struct OwnCredentials {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
    capabilities: CapabilitySets,
}

thread_local! {
    /// Whether this thread's umask is its own.
    static OWN_UMASK: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread's credentials have ever changed.
    static CHANGED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread has ever acted as another user.
///
/// If so, the kernel keeps a separate copy of the credentials for this thread, even when the values are the original
/// ones again. Some drivers (RDMA) compare copies instead of values, and refuse such a thread's calls. A thread that it
/// starts inherits the copy, which is not recorded here: threads that act as users start others by a
/// [`crate::ThreadStarter`].
#[must_use]
pub fn has_changed() -> bool {
    CHANGED.get()
}

/// Records for [`has_changed`] that this thread has changed its credentials by other means than
/// [`OwnCredentials::act_as`].
pub fn note_change() {
    CHANGED.set(true);
}

impl OwnCredentials {
    /// The credentials of this thread; `None` if it is not root's, and so cannot act as others.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn of_root() -> std::io::Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        Ok(Some(Self { uid, gid, groups: getgroups()?, capabilities: capabilities(None)? }))
    }

    /// Makes this thread access files with these credentials until the value is dropped.
    ///
    /// # Errors
    /// `EPERM` for an invalid number, and when the kernel refuses, for example a user that this process's user
    /// namespace does not have.
    pub fn act_as(&self, who: &Credentials<'_>) -> Result<Acting<'_>, Errno> {
        if [who.uid, who.gid].iter().chain(who.groups).any(|number| *number == u32::MAX) {
            return Err(Errno::PERM);
        }
        note_change();
        let acting = Acting { own: self, _of_this_thread: PhantomData };
        let groups: Vec<Gid> = who.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)?;
        set_fs_gid(who.gid)?;
        set_fs_uid(who.uid)?;
        if who.uid != 0 || !who.privileged {
            // Those that a change of user keeps: CAP_SYS_RESOURCE, which opens reserved blocks, CAP_SYS_ADMIN and
            // others.
            set_capabilities(
                None,
                CapabilitySets { effective: CapabilitySet::empty(), ..self.capabilities },
            )?;
        }
        Ok(acting)
    }
}

/// A thread with another user's credentials, until this is dropped.
pub struct Acting<'a> {
    own: &'a OwnCredentials,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        // A thread for which this fails keeps fewer rights, and its next switch reports it.
        let _ = set_fs_uid(self.own.uid);
        let _ = set_fs_gid(self.own.gid);
        let _ = set_capabilities(None, self.own.capabilities);
        let _ = set_thread_groups(&self.own.groups);
    }
}

/// The call does not report failure; a second call shows whether it worked.
fn set_fs_uid(uid: u32) -> Result<(), Errno> {
    // SAFETY: these calls take numbers, and only change this thread's credentials.
    let now = unsafe {
        libc::setfsuid(uid);
        libc::setfsuid(u32::MAX)
    };
    if now as u32 == uid { Ok(()) } else { Err(Errno::PERM) }
}

/// The same for the group.
fn set_fs_gid(gid: u32) -> Result<(), Errno> {
    // SAFETY: as above.
    let now = unsafe {
        libc::setfsgid(gid);
        libc::setfsgid(u32::MAX)
    };
    if now as u32 == gid { Ok(()) } else { Err(Errno::PERM) }
}

/// Sets this thread's umask until it is dropped.
pub struct Umask {
    before: rustix::fs::Mode,
    _of_this_thread: PhantomData<*const ()>,
}

impl Umask {
    /// Sets the umask of this thread only.
    ///
    /// # Errors
    /// When the thread cannot have a separate one.
    pub fn set(umask: u32) -> Result<Self, Errno> {
        if !OWN_UMASK.get() {
            // SAFETY: this thread gets its own copy of umask, root and working directory; no descriptor is concerned.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
            OWN_UMASK.set(true);
        }
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask & 0o777));
        Ok(Self { before, _of_this_thread: PhantomData })
    }
}

impl Drop for Umask {
    fn drop(&mut self) {
        rustix::process::umask(self.before);
    }
}

/// The groups of the thread that a request comes from, if it has this user and group.
///
/// `None` for a request with other credentials than its thread's own (overlayfs, personalities of io_uring), and for a
/// thread that has ended or cannot be seen from here.
///
/// # Errors
/// When the system is out of descriptors or memory: the groups are unknown, and not none.
pub fn groups_of(thread: u32, uid: u32, gid: u32) -> Result<Option<Vec<u32>>, Errno> {
    groups_in(std::fs::read_to_string(format!("/proc/{thread}/status")), uid, gid)
}

fn groups_in(status: std::io::Result<String>, uid: u32, gid: u32) -> Result<Option<Vec<u32>>, Errno> {
    match status {
        Ok(status) => Ok(parse_groups(&status, uid, gid)),
        Err(error) => match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
            // The last two where /proc hides the processes of others.
            Errno::NOENT | Errno::SRCH | Errno::PERM | Errno::ACCESS => Ok(None),
            error => Err(error),
        },
    }
}

fn parse_groups(status: &str, uid: u32, gid: u32) -> Option<Vec<u32>> {
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::split_whitespace);
    // Real, effective, saved, and file-system ID.
    let acts_as = |name: &str, id: u32| field(name)?.nth(3).map(|found| found.parse() == Ok(id));
    if !(acts_as("Uid:", uid)? && acts_as("Gid:", gid)?) {
        return None;
    }
    field("Groups:")?.map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn root() -> Option<OwnCredentials> {
        let own = OwnCredentials::of_root().unwrap();
        if own.is_none() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: only root can act as another user");
        }
        own
    }

    const USER: Credentials<'_> =
        Credentials { uid: 21_001, gid: 21_002, groups: &[21_003], privileged: true };

    #[test]
    fn the_number_that_changes_nothing_is_invalid() {
        let Some(own) = root() else { return };
        const NONE: u32 = u32::MAX;
        for who in [
            Credentials { uid: NONE, ..USER },
            Credentials { gid: NONE, ..USER },
            Credentials { groups: &[21_003, NONE], ..USER },
        ] {
            assert_eq!(own.act_as(&who).err(), Some(Errno::PERM), "{who:?}");
        }
        assert!(!has_changed());
    }

    #[test]
    fn the_kernel_checks_only_the_users_rights() {
        let Some(own) = root() else { return };
        let dir = std::env::temp_dir().join(format!("onehop-identity-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
        let secret = dir.join("secret");
        std::fs::write(&secret, "secret").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o640)).unwrap();
        let before = capabilities(None).unwrap();
        assert!(!has_changed());
        let acting = own.act_as(&USER).unwrap();
        assert!(capabilities(None).unwrap().effective.is_empty());
        assert_eq!(std::fs::read(&secret).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        std::fs::write(dir.join("mine"), "mine").unwrap();
        drop(acting);
        let made = std::fs::metadata(dir.join("mine")).unwrap();
        assert_eq!((made.uid(), made.gid()), (21_001, 21_002));
        assert_eq!(capabilities(None).unwrap(), before);
        assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
        // A supplementary group counts; other threads are unaffected.
        std::os::unix::fs::chown(&secret, None, Some(21_003)).unwrap();
        let acting = own.act_as(&USER).unwrap();
        assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
        let other = std::thread::spawn(|| (capabilities(None).unwrap(), getgroups().unwrap()));
        // A new thread inherits its creator's; threads that already run do not.
        assert!(other.join().unwrap().0.effective.is_empty());
        drop(acting);
        assert!(has_changed() && !std::thread::spawn(has_changed).join().unwrap());
        assert_eq!(getgroups().unwrap(), own.groups);
        // An invalid user number does not make root.
        assert_eq!(own.act_as(&Credentials { uid: u32::MAX, ..USER }).err(), Some(Errno::PERM));
        assert_eq!(own.act_as(&Credentials { gid: u32::MAX, ..USER }).err(), Some(Errno::PERM));
        assert_eq!(capabilities(None).unwrap(), before);
        std::fs::write(dir.join("root"), "").unwrap();
        assert_eq!(std::fs::metadata(dir.join("root")).unwrap().uid(), 0);
        let bare = Credentials { uid: 0, gid: 0, groups: &[], privileged: false };
        let acting = own.act_as(&bare).unwrap();
        assert!(capabilities(None).unwrap().effective.is_empty());
        drop(acting);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_umask_is_one_thread_s() {
        let here = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        rustix::process::umask(here);
        std::thread::spawn(move || {
            let umask = Umask::set(0o077).unwrap();
            assert_eq!(umask.before, here);
            let _inner = Umask::set(0).unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(rustix::process::umask(here), here);
    }

    #[test]
    fn groups_are_those_of_the_credentials_that_a_request_has() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t10 20 \nNStgid:\t1\n";
        assert_eq!(parse_groups(status, 4, 8), Some(vec![10, 20]));
        assert_eq!(parse_groups(status, 1, 8), None);
        assert_eq!(parse_groups(status, 4, 5), None);
        assert_eq!(parse_groups("Uid:\t1\n", 1, 1), None);
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        let wanted: Vec<u32> = getgroups().unwrap().into_iter().map(Gid::as_raw).collect();
        assert_eq!(groups_of(me, uid, gid), Ok(Some(wanted)));
        assert_eq!(groups_of(0, uid, gid), Ok(None));
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(groups_in(Err(error.into()), uid, gid), Err(error));
        }
        assert_eq!(groups_in(Err(Errno::SRCH.into()), uid, gid), Ok(None));
    }
}
