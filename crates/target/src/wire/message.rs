//! What is asked of a server, and what it answers.

use serde::{Deserialize, Serialize};

use super::{MOST_LINK, MOST_NAME, MOST_XATTR, MountId};

/// The number of the root folder.
pub const ROOT: u64 = 1;

/// A name in a folder: one component of a path, neither `.` nor `..`. That it is one is checked by whoever reads it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Vec<u8>);

impl Name {
    /// Checks a name.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let sound = (1..=MOST_NAME).contains(&bytes.len())
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

/// No user has this number. What counts for it is done whatever users wait for.
pub const NO_USER: u32 = u32::MAX;

/// A moment, in seconds since 1970 and nanoseconds.
pub type Time = (i64, u32);

/// With whose rights something is done: numbers of the client's machine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group that what they make gets.
    pub gid: u32,
    /// Their other groups.
    pub groups: Vec<u32>,
    /// The bits that a mode loses when something is made.
    pub umask: u32,
}

impl Caller {
    /// The client's machine itself.
    pub const ROOT: Self = Self { uid: 0, gid: 0, groups: Vec::new(), umask: 0 };

    /// What files are checked against.
    pub(crate) fn credentials(&self) -> onehop_os::identity::Credentials<'_> {
        let Self { uid, gid, groups, .. } = self;
        onehop_os::identity::Credentials { uid: *uid, gid: *gid, groups, privileged: true }
    }
}

/// What kind of file something is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FileKind {
    /// A file with bytes.
    Regular,
    /// A folder.
    Folder,
    /// A symbolic link, which nobody follows but the client's kernel.
    Link,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A device for characters.
    Char,
    /// A device for blocks.
    Block,
}

/// Which file something is, whatever it is called and whoever serves it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct FileKey {
    /// Its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// When it was made, where the file system knows: numbers are used again.
    pub born: Option<Time>,
}

/// What is known of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attr {
    /// The session's number for it.
    pub node: u64,
    /// Which file it is.
    pub key: FileKey,
    /// Its kind.
    pub kind: FileKind,
    /// Who may do what.
    pub perm: u16,
    /// Its names.
    pub links: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// What device it is.
    pub rdev: u64,
    /// Its length.
    pub size: u64,
    /// What it takes, in 512 bytes.
    pub blocks: u64,
    /// A good length for transfers.
    pub block_size: u32,
    /// When it was last read, changed, and its attributes changed.
    pub times: [Time; 3],
}

/// What becomes of a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TimeChange {
    /// It is what the server's clock says.
    Now,
    /// It is this.
    To(Time),
}

/// What is to become of a file's attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct AttrChange {
    /// Who may do what.
    pub mode: Option<u32>,
    /// Its user.
    pub uid: Option<u32>,
    /// Its group.
    pub gid: Option<u32>,
    /// Its length.
    pub size: Option<u64>,
    /// When it was last read.
    pub atime: Option<TimeChange>,
    /// When it was last changed.
    pub mtime: Option<TimeChange>,
}

/// What is to be made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Make {
    /// A folder.
    Folder {
        /// Who may do what.
        mode: u32,
    },
    /// A file, a pipe or a socket; a device is refused.
    Node {
        /// Its kind, and who may do what.
        mode: u32,
        /// What device.
        rdev: u32,
    },
    /// A symbolic link.
    Link {
        /// What it says.
        text: Vec<u8>,
    },
}

impl Make {
    /// Whether its lengths are allowed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        match self {
            Self::Link { text } => (1..=MOST_LINK).contains(&text.len()) && !text.contains(&0),
            Self::Folder { .. } | Self::Node { .. } => true,
        }
    }
}

/// The attribute that is a file's access control list.
pub const ACCESS_LIST: &str = "system.posix_acl_access";

/// What is asked of a file's extended attributes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of Linux's calls")]
pub enum Xattr {
    /// The bytes of one.
    Get { name: Vec<u8> },
    /// One is made or replaced.
    Set { name: Vec<u8>, value: Vec<u8>, flags: u32 },
    /// All their names, with a zero behind each.
    List,
    /// One goes.
    Remove { name: Vec<u8> },
}

impl Xattr {
    /// Its name, where it is about one.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        match self {
            Self::Get { name } | Self::Set { name, .. } | Self::Remove { name } => name,
            Self::List => b"",
        }
    }

    /// Whether its lengths are allowed.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let fits = !matches!(self, Self::Set { value, .. } if value.len() > MOST_XATTR);
        fits && self.name().len() <= MOST_NAME && !self.name().contains(&0)
    }

    fn changes(&self) -> bool {
        matches!(self, Self::Set { .. } | Self::Remove { .. })
    }
}

/// How a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OpenMode {
    /// To be read.
    pub read: bool,
    /// To be written.
    pub write: bool,
    /// It is empty from now on.
    pub truncate: bool,
    /// Each write waits for the disk: all of it, or what it takes to read the data again.
    pub sync: bool,
    /// See [`Self::sync`].
    pub data_sync: bool,
    /// The time of the last read stays.
    pub no_atime: bool,
    /// It is read to be run, for which the right to run it is enough.
    pub execute: bool,
}

/// Memory of the client that the server's side of a transport reaches by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Remote {
    /// Where it begins, as the client's adapters see it.
    pub addr: u64,
    /// How long it is: at least as long as the transfer.
    pub len: u64,
    /// The key for each of the client's adapters, in the transport's own order.
    pub keys: [u32; 4],
}

/// Something to be done. Numbers of files (`node`) and of open files (`file`) are those of the session.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what their names say")]
pub enum Request {
    /// A name in a folder. What is found is remembered until it is forgotten.
    Lookup { parent: u64, name: Name, by: Caller },
    /// A user's files are not needed any more: open ones, which are closed, and numbers, each with how many of the times that it was
    /// told are forgotten.
    Release { uid: u32, files: Vec<u64>, nodes: Vec<(u64, u64)> },
    /// What is known of a file. That needs no rights, nor does what else has a user's number only; it counts for the user.
    Attr { node: u64, uid: u32 },
    /// Attributes of a file.
    Change { node: u64, file: Option<u64>, change: AttrChange, by: Caller },
    /// What a symbolic link says.
    ReadLink { node: u64, uid: u32 },
    /// Something new in a folder.
    Make { parent: u64, name: Name, make: Make, by: Caller },
    /// A new file, opened; with `exclusive` off, one that is there is opened.
    Create { parent: u64, name: Name, mode: u32, access: OpenMode, exclusive: bool, by: Caller },
    /// A name goes: of a folder, or of anything else.
    Remove { parent: u64, name: Name, folder: bool, by: Caller },
    /// A name becomes another one; `flags` as for `renameat2`.
    Rename { parent: u64, name: Name, to: u64, new_name: Name, flags: u32, by: Caller },
    /// Another name for a file.
    Link { node: u64, parent: u64, name: Name, by: Caller },
    /// Names in a folder, from a place on that the server told, at first 0.
    List { node: u64, from: u64, by: Caller },
    /// A folder's names are on the disk when it is answered.
    SyncFolder { node: u64, uid: u32 },
    /// How much room there is.
    Space { uid: u32 },
    /// A file is opened; `again` if its caller had it open in a session that was lost, whatever its mode says by now.
    Open { node: u64, access: OpenMode, again: bool, by: Caller },
    /// Bytes of an open file, behind the reply or into the client's memory.
    Read { file: u64, at: u64, len: u32, into: Option<Remote> },
    /// Bytes to an open file, behind the request or out of the client's memory.
    Write { file: u64, at: u64, len: u32, from: Option<Remote> },
    /// What was written is on the disk when it is answered.
    Sync { file: u64, data_only: bool },
    /// Room for bytes, or holes; `mode` as for `fallocate`.
    Allocate { file: u64, mode: u32, at: u64, len: u64 },
    /// Where the next hole or the next data is, from a place on.
    Seek { file: u64, at: u64, hole: bool },
    /// Extended attributes of a file.
    Xattr { node: u64, ask: Xattr, by: Caller },
    /// Bytes behind the end of an open file, wherever that is by then; they come behind the request.
    Append { file: u64, len: u32 },
    /// An open file loses what has it run with rights of its owner, because somebody writes who is not who opened it.
    DropSetId { file: u64 },
    /// The client is there in the place of a mount that was killed: nothing that one asked for happens after the answer.
    Succeed { mount: MountId },
    /// Of all requests below a number, the client waits for these only: others are not begun any more. It gave some up and does not
    /// hear their answers: what those brought is released.
    Outstanding { below: u64, ids: Vec<u64>, unheard: Vec<u64> },
}

impl Request {
    /// Whether doing it twice is as good as once, so that nothing about it needs to be remembered.
    #[must_use]
    pub fn only_looks(&self) -> bool {
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

    /// Whether its answer brings the number of a file that has to be released.
    #[must_use]
    pub fn brings(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::Make { .. }
                | Self::Create { .. }
                | Self::Link { .. }
                | Self::Open { .. }
        )
    }

    /// Whether bytes of a file go one way or the other.
    #[must_use]
    pub fn moves_data(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. } | Self::Append { .. })
    }

    /// Whether the server's side of the transport reaches memory of the client by itself.
    #[must_use]
    pub fn reaches(&self) -> bool {
        matches!(self, Self::Read { into: Some(_), .. } | Self::Write { from: Some(_), .. })
    }

    /// Bytes that come behind it.
    #[must_use]
    pub fn data(&self) -> Option<u32> {
        match self {
            Self::Write { len, from: None, .. } | Self::Append { len, .. } => Some(*len),
            _ => None,
        }
    }

    /// Whether it changes what is on the server's disk.
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

/// How much room there is, as `statvfs` says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FsSpace {
    /// Blocks in all, free, and free for everybody.
    pub blocks: [u64; 3],
    /// Files in all, and free.
    pub files: [u64; 2],
    /// Bytes of a block, and of a fragment.
    pub block_size: [u32; 2],
    /// Bytes of a name.
    pub name_max: u32,
}

/// What came of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what their names say")]
pub enum Reply {
    /// It was done.
    Done,
    /// It was not, for this reason of Linux's.
    Failed { errno: i32 },
    /// A file.
    Attr(Attr),
    /// A file, and its number as an open one.
    Created { attr: Attr, file: u64 },
    /// The number of an open file.
    Opened { file: u64 },
    /// What a link says, or an extended attribute.
    Text(Vec<u8>),
    /// Names: number, kind, where to go on behind it, and name; and where to go on behind all; none at the end.
    Names { names: Vec<(u64, FileKind, u64, Vec<u8>)>, next: Option<u64> },
    /// How much room there is.
    Space(FsSpace),
    /// So many bytes were read or written. `crc` is the CRC-32C of bytes that went into the client's memory.
    Count { bytes: u32, crc: u32 },
    /// A place in a file.
    Place(u64),
}
