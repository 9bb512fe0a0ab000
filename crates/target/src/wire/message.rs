//! Requests to a server, and its replies.

use serde::{Deserialize, Serialize};

use super::{MAX_LINK, MAX_NAME, MAX_XATTR, MountId};

/// The number of the root folder.
pub const ROOT: u64 = 1;

/// A name in a folder: one component of a path, neither `.` nor `..`. Checked when it is decoded.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Vec<u8>);

impl Name {
    /// Checks a name.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let sound = (1..=MAX_NAME).contains(&bytes.len())
            && bytes != b"."
            && bytes != b".."
            && !bytes.iter().any(|byte| [0, b'/'].contains(byte));
        sound.then(|| Self(bytes.to_vec()))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for Name {
    type Error = &'static str;

    fn try_from(bytes: Vec<u8>) -> Result<Self, Self::Error> {
        Self::new(&bytes).ok_or("not a valid file name")
    }
}

impl From<Name> for Vec<u8> {
    fn from(name: Name) -> Self {
        name.0
    }
}

/// A user ID that no user has. Requests that count for it do not wait behind users' requests.
pub const NO_USER: u32 = u32::MAX;

/// A time in seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// The credentials for a request, as IDs of the client's machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// The umask.
    pub umask: u32,
}

impl Caller {
    /// Root of the client's machine.
    pub const ROOT: Self = Self { uid: 0, gid: 0, groups: Vec::new(), umask: 0 };

    /// The credentials for file system calls.
    pub(crate) fn credentials(&self) -> onehop_os::identity::Credentials<'_> {
        let Self { uid, gid, groups, .. } = self;
        onehop_os::identity::Credentials { uid: *uid, gid: *gid, groups, privileged: true }
    }
}

/// The type of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A folder.
    Folder,
    /// A symbolic link. Only the client's kernel follows it.
    Link,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A character device.
    Char,
    /// A block device.
    Block,
}

/// Identifies a file, under any name and server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FileKey {
    /// The device ID of its file system.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// Its birth time, if the file system has one: inode numbers are reused.
    pub born: Option<Time>,
}

/// The attributes of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attr {
    /// The session's number for the file.
    pub node: u64,
    /// The file's identity.
    pub key: FileKey,
    /// The file type.
    pub kind: FileKind,
    /// The permission bits.
    pub perm: u16,
    /// The link count.
    pub links: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The device ID, for device files.
    pub rdev: u64,
    /// The size in bytes.
    pub size: u64,
    /// The allocated blocks of 512 bytes.
    pub blocks: u64,
    /// The preferred block size for I/O.
    pub block_size: u32,
    /// The times of the last access, modification and status change.
    pub times: [Time; 3],
}

/// A change of a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TimeChange {
    /// The current time of the server.
    Now,
    /// A given time.
    To(Time),
}

/// Changes of a file's attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct AttrChange {
    /// The permission bits.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The size.
    pub size: Option<u64>,
    /// The time of the last access.
    pub atime: Option<TimeChange>,
    /// The time of the last modification.
    pub mtime: Option<TimeChange>,
}

/// Something to create.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Make {
    /// A folder.
    Folder {
        /// The permission bits.
        mode: u32,
    },
    /// A file, pipe or socket. Devices are refused.
    Node {
        /// The file type and permission bits.
        mode: u32,
        /// The device ID.
        rdev: u32,
    },
    /// A symbolic link.
    Link {
        /// The target.
        text: Vec<u8>,
    },
}

impl Make {
    /// Whether its lengths are valid.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        match self {
            Self::Link { text } => (1..=MAX_LINK).contains(&text.len()) && !text.contains(&0),
            Self::Folder { .. } | Self::Node { .. } => true,
        }
    }
}

/// The extended attribute that holds a file's access control list.
pub const ACCESS_LIST: &str = "system.posix_acl_access";

/// A request about extended attributes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of Linux's calls")]
pub enum Xattr {
    /// The value of an attribute.
    Get { name: Vec<u8> },
    /// Creates or replaces an attribute.
    Set { name: Vec<u8>, value: Vec<u8>, flags: u32 },
    /// All names, each followed by a zero byte.
    List,
    /// Removes an attribute.
    Remove { name: Vec<u8> },
}

impl Xattr {
    /// The name, or empty for a list.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        match self {
            Self::Get { name } | Self::Set { name, .. } | Self::Remove { name } => name,
            Self::List => b"",
        }
    }

    /// Whether its lengths are valid.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let fits = !matches!(self, Self::Set { value, .. } if value.len() > MAX_XATTR);
        fits && self.name().len() <= MAX_NAME && !self.name().contains(&0)
    }

    fn changes(&self) -> bool {
        matches!(self, Self::Set { .. } | Self::Remove { .. })
    }
}

/// The mode in which a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OpenMode {
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// Truncates the file.
    pub truncate: bool,
    /// `O_SYNC`: each write waits for the disk.
    pub sync: bool,
    /// `O_DSYNC`: each write waits until the data is on the disk.
    pub data_sync: bool,
    /// `O_NOATIME`.
    pub no_atime: bool,
    /// For execution: requires execute permission instead of read permission.
    pub execute: bool,
}

/// Memory of the client that the server reaches through the transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Remote {
    /// The address for the client's adapters.
    pub addr: u64,
    /// The length, at least that of the transfer.
    pub len: u64,
    /// The key for each of the client's adapters, as the transport orders them.
    pub keys: [u32; 4],
}

/// A request. Numbers of files (`node`) and of open files (`file`) belong to the session.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what their names say")]
pub enum Request {
    /// Looks a name up. The server remembers the file until it is forgotten.
    Lookup { parent: u64, name: Name, by: Caller },
    /// Releases files of a user: closes open files, and forgets nodes, each with the number of lookups that are
    /// forgotten.
    Release { uid: u32, files: Vec<u64>, nodes: Vec<(u64, u64)> },
    /// The attributes of a file. Like all requests with only a user ID, it needs no permission, and counts for the
    /// user.
    Attr { node: u64, uid: u32 },
    /// Changes attributes of a file.
    Change { node: u64, file: Option<u64>, change: AttrChange, by: Caller },
    /// The target of a symbolic link.
    ReadLink { node: u64, uid: u32 },
    /// Creates something in a folder.
    Make { parent: u64, name: Name, make: Make, by: Caller },
    /// Creates and opens a file. Without `exclusive`, an existing one is opened.
    Create { parent: u64, name: Name, mode: u32, access: OpenMode, exclusive: bool, by: Caller },
    /// Removes a name: a folder's, or any other.
    Remove { parent: u64, name: Name, folder: bool, by: Caller },
    /// Renames; `flags` as for `renameat2`.
    Rename { parent: u64, name: Name, to: u64, new_name: Name, flags: u32, by: Caller },
    /// Creates a hard link.
    Link { node: u64, parent: u64, name: Name, by: Caller },
    /// Names in a folder, from an offset of an earlier reply on, or from 0.
    List { node: u64, from: u64, by: Caller },
    /// Writes a folder's names to the disk before the reply.
    SyncFolder { node: u64, uid: u32 },
    /// The space of the file system.
    Space { uid: u32 },
    /// Opens a file. `again` if the caller had it open in a lost session; then its mode is not checked.
    Open { node: u64, access: OpenMode, again: bool, by: Caller },
    /// Reads from an open file: the data follows the reply, or goes into the client's memory.
    Read { file: u64, at: u64, len: u32, into: Option<Remote> },
    /// Writes to an open file: the data follows the request, or comes from the client's memory.
    Write { file: u64, at: u64, len: u32, from: Option<Remote> },
    /// Writes a file to the disk before the reply.
    Sync { file: u64, data_only: bool },
    /// Allocates space or punches holes; `mode` as for `fallocate`.
    Allocate { file: u64, mode: u32, at: u64, len: u64 },
    /// The offset of the next hole or the next data.
    Seek { file: u64, at: u64, hole: bool },
    /// A request about extended attributes of a file.
    Xattr { node: u64, ask: Xattr, by: Caller },
    /// Appends to an open file. The data follows the request.
    Append { file: u64, len: u32 },
    /// Clears the set-id bits of an open file, because another user than its opener writes to it.
    DropSetId { file: u64 },
    /// This client succeeds a mount that was killed: no request of that mount is executed after the reply.
    Succeed { mount: MountId },
    /// Of all requests below a number, the client waits for `ids` only; others must not be started any more. Files in
    /// the answers to the cancelled requests `unheard` are released.
    Outstanding { below: u64, ids: Vec<u64>, unheard: Vec<u64> },
}

impl Request {
    /// Whether it has no side effects, so that it may be executed again instead of being recorded.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        if let Self::Xattr { ask, .. } = self {
            return !ask.changes();
        }
        matches!(
            self,
            Self::Attr { .. }
                | Self::ReadLink { .. }
                | Self::List { .. }
                | Self::Space { .. }
                | Self::Read { .. }
                | Self::Seek { .. }
        )
    }

    /// Whether its reply contains numbers of files, which have to be released.
    #[must_use]
    pub fn returns_files(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::Make { .. }
                | Self::Create { .. }
                | Self::Link { .. }
                | Self::Open { .. }
        )
    }

    /// Whether it transfers file data.
    #[must_use]
    pub fn moves_data(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. } | Self::Append { .. })
    }

    /// Whether the server accesses memory of the client for it.
    #[must_use]
    pub fn reaches(&self) -> bool {
        matches!(self, Self::Read { into: Some(_), .. } | Self::Write { from: Some(_), .. })
    }

    /// The length of the data that follows it.
    #[must_use]
    pub fn data(&self) -> Option<u32> {
        match self {
            Self::Write { len, from: None, .. } | Self::Append { len, .. } => Some(*len),
            _ => None,
        }
    }

    /// Whether it may change the server's files.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Change { .. }
            | Self::Make { .. }
            | Self::Create { .. }
            | Self::Remove { .. }
            | Self::Rename { .. }
            | Self::Link { .. }
            | Self::Write { .. }
            | Self::Append { .. }
            | Self::DropSetId { .. }
            | Self::Allocate { .. } => true,
            Self::Open { access, .. } => access.write || access.truncate,
            Self::Xattr { ask, .. } => ask.changes(),
            _ => false,
        }
    }
}

/// The space of a file system, as `statvfs` reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FsSpace {
    /// All blocks, free ones, and those free for unprivileged users.
    pub blocks: [u64; 3],
    /// All inodes, and free ones.
    pub files: [u64; 2],
    /// Block size and fragment size.
    pub block_size: [u32; 2],
    /// The longest name.
    pub name_max: u32,
}

/// The reply to a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what their names say")]
pub enum Reply {
    /// Success.
    Done,
    /// Failure, with Linux's error number.
    Failed { errno: i32 },
    /// The attributes of a file.
    Attr(Attr),
    /// The attributes of a new file, and its number as an open file.
    Created { attr: Attr, file: u64 },
    /// The number of an open file, and whether it has a name.
    Opened { file: u64, has_name: bool },
    /// The target of a link, or data about extended attributes.
    Text(Vec<u8>),
    /// Names: inode number, type, offset of the next entry, and name; and the offset of the rest, `None` at the end.
    Names { names: Vec<(u64, FileKind, u64, Vec<u8>)>, next: Option<u64> },
    /// The space of the file system.
    Space(FsSpace),
    /// The number of bytes read or written. `crc` is the CRC-32C of data that was written into the client's memory.
    Count { bytes: u32, crc: u32 },
    /// An offset in a file.
    Place(u64),
}
