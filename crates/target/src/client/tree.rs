//! The folder of a target. Each file is known by its place, so that it can be looked up again after the target has lost
//! its number. It is used only if it is still the same file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::file::RemoteFile;
use super::known::{KnownFiles, Node, RemoteNodeId, is_same};
use super::root::RootCache;
use super::{Client, ClientOptions, ClientThreads, MountReport, RequestError, SessionView};
use crate::auth::random;
use crate::shares::Payer;
use crate::transport::{Connector, Shareable};
use crate::tree::{FolderNames, Forgotten, OpenFile, Tree, TreeResult};
use crate::wire::{
    ACCESS_LIST, Attr, AttrChange, Caller, FsSpace, Make, MountId, NO_USER, Name, OpenMode, ROOT, Reply,
    Request, Xattr,
};
use crate::{Result, lock};

/// The most nested folders on the path to a file.
const MAX_DEPTH: usize = 4096;

/// The state of a tree.
pub(super) struct TreeState {
    pub client: Arc<Client>,
    known: KnownFiles,
    root_attr: RootCache<Attr>,
    /// The root's access control list, or the error that it has none.
    root_list: RootCache<TreeResult<Vec<u8>>>,
}

/// A folder that a target serves.
pub struct RemoteTree {
    core: Arc<TreeState>,
    _threads: ClientThreads,
}

impl RemoteTree {
    /// Connects to a target.
    ///
    /// # Errors
    /// When it cannot be reached, does not accept our key, or violates the protocol.
    pub fn connect(connector: Box<dyn Connector>, options: ClientOptions) -> Result<Self> {
        let client = Client::new(connector, random()?, options);
        let mut threads = ClientThreads::start(&client)?;
        let peer = client.report().target;
        let request = Request::Attr { node: ROOT, uid: NO_USER };
        let found =
            client.ask(true, |view, until| attr_of(client.call(view.epoch, &request, None, None, until)));
        let attr = found.map_err(|e| crate::Error::io("reading the folder of", &peer, e))?;
        let known = KnownFiles::new(attr.key);
        let list = client
            .ask(true, |view, until| text_of(client.call(view.epoch, &list_of(ROOT), None, None, until)));
        let (root_attr, root_list) = (RootCache::new(attr), RootCache::new(list));
        let core = Arc::new(TreeState { client, known, root_attr, root_list });
        let of = core.clone();
        threads.add("target list", move || {
            of.root_list.serve(|| of.client.is_over(), || of.ask_for_list());
        })?;
        let of = core.clone();
        threads
            .add("target root", move || of.root_attr.serve(|| of.client.is_over(), || of.ask_of_root()))?;
        Ok(Self { core, _threads: threads })
    }

    /// The ID of this mount, for [`Self::succeed`] of the next one.
    #[must_use]
    pub fn mount_id(&self) -> MountId {
        self.core.client.mount
    }

    /// Takes the place of a mount that was killed: none of its requests is executed after this.
    ///
    /// # Errors
    /// `EBUSY` when one of its requests does not end.
    pub fn succeed(&self, mount: MountId) -> TreeResult<()> {
        let client = &self.core.client;
        client.ask(true, |view, until| {
            client.call(view.epoch, &Request::Succeed { mount }, None, None, until).map(drop)
        })
    }

    /// The state of the connections.
    #[must_use]
    pub fn report(&self) -> MountReport {
        self.core.client.report()
    }

    /// From now on, requests to a target that is gone wait at most this long.
    pub fn end_within(&self, time: Duration) {
        self.core.client.end_within(time);
    }

    /// Sets the function that maps users to those for whom their buffers count. Later calls have no effect.
    pub fn set_payer(&self, payer: Payer<u32>) {
        self.core.client.set_payer(payer);
    }

    /// Releases memory that transfers have used.
    pub fn forget_memory(&self, memory: &Shareable) {
        self.core.client.forget_memory(memory);
    }

    /// The route of data.
    #[must_use]
    pub fn via(&self) -> crate::tree::Via {
        self.core.client.via()
    }
}

type Called = std::result::Result<(Reply, usize), RequestError>;

pub(super) fn attr_of(called: Called) -> std::result::Result<Attr, RequestError> {
    match called?.0 {
        Reply::Attr(attr) => Ok(attr),
        _ => Err(Errno::PROTO.into()),
    }
}

fn done(called: Called) -> std::result::Result<(), RequestError> {
    match called?.0 {
        Reply::Done => Ok(()),
        _ => Err(Errno::PROTO.into()),
    }
}

impl TreeState {
    pub fn call(&self, view: SessionView, request: &Request, until: Instant) -> Called {
        self.client.call(view.epoch, request, None, None, until)
    }

    /// The target's current number of a file, which is looked up again if necessary.
    pub fn id_of(
        &self,
        node: &Arc<Node>,
        view: SessionView,
        until: Instant,
    ) -> std::result::Result<u64, RequestError> {
        let mut chain: Vec<Arc<Node>> = Vec::new();
        let mut next = node.clone();
        let mut id = loop {
            let at = *lock(&next.at);
            if at.epoch == view.epoch {
                break at.id;
            }
            if next.number == ROOT {
                break self.check_root(view, until)?;
            }
            let place = lock(&next.place).clone();
            let (parent, _) = place.ok_or(Errno::STALE)?;
            chain.push(std::mem::replace(&mut next, parent));
            if chain.len() > MAX_DEPTH {
                return Err(Errno::STALE.into());
            }
        };
        for node in chain.iter().rev() {
            id = self.find_again(node, id, view, until)?;
        }
        Ok(id)
    }

    fn ask_of_root(&self) -> TreeResult<Attr> {
        let ask = |view, until| {
            let node = self.id_of(&self.known.root, view, until)?;
            attr_of(self.call(view, &Request::Attr { node, uid: NO_USER }, until))
        };
        self.client.ask(true, ask)
    }

    fn ask_for_list(&self) -> TreeResult<TreeResult<Vec<u8>>> {
        fact(self.client.ask(true, |view, until| {
            let node = self.id_of(&self.known.root, view, until)?;
            text_of(self.call(view, &list_of(node), until))
        }))
    }

    fn check_root(&self, view: SessionView, until: Instant) -> std::result::Result<u64, RequestError> {
        let attr = attr_of(self.call(view, &Request::Attr { node: ROOT, uid: NO_USER }, until))?;
        if !is_same(&attr.key, &self.known.root.key) {
            // The target serves another folder now.
            return Err(Errno::STALE.into());
        }
        *lock(&self.known.root.at) = RemoteNodeId { epoch: view.epoch, id: ROOT, returned: 0 };
        Ok(ROOT)
    }

    fn find_again(
        &self,
        node: &Node,
        parent: u64,
        view: SessionView,
        until: Instant,
    ) -> std::result::Result<u64, RequestError> {
        let (_, name) = lock(&node.place).clone().ok_or(Errno::STALE)?;
        // As root: the result is used only if it is the known file.
        let request = Request::Lookup { parent, name, by: Caller::ROOT };
        let found = attr_of(self.call(view, &request, until));
        let attr = found.map_err(|error| match error {
            RequestError::Errno(Errno::NOENT | Errno::NOTDIR) => Errno::STALE.into(),
            other => other,
        })?;
        if !is_same(&attr.key, &node.key) {
            self.client.releases.forget(view.epoch, node.uid, (attr.node, 1));
            return Err(Errno::STALE.into());
        }
        node.record_id(view, attr.node);
        Ok(attr.node)
    }

    fn forget(&self, number: u64, times: u64) {
        let Some(node) = self.known.forget(number, times) else { return };
        // Holders of the node look it up again.
        let at = std::mem::take(&mut *lock(&node.at));
        if at.returned > 0 {
            self.client.releases.forget(at.epoch, node.uid, (at.id, at.returned));
        }
    }
}

impl RemoteTree {
    /// Sends a request about a file, by its number.
    fn about<T>(
        &self,
        node: u64,
        repeatable: bool,
        request: impl Fn(u64) -> Request,
        read: impl Fn(Called) -> std::result::Result<T, RequestError>,
    ) -> TreeResult<T> {
        let node = self.core.known.node(node)?;
        self.core.client.ask(repeatable, |view, until| {
            let id = self.core.id_of(&node, view, until)?;
            read(self.core.call(view, &request(id), until))
        })
    }

    /// Changes names in a folder.
    fn in_folder<T>(
        &self,
        parent: &Arc<Node>,
        repeatable: bool,
        ask: impl Fn(u64, SessionView, Instant) -> std::result::Result<T, RequestError>,
    ) -> TreeResult<T> {
        self.core.client.ask(repeatable, |view, until| {
            let id = self.core.id_of(parent, view, until)?;
            let done = ask(id, view, until)?;
            parent.changed(view);
            Ok(done)
        })
    }
}

impl Tree for RemoteTree {
    fn lookup(&self, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr> {
        let parent = self.core.known.node(parent)?;
        self.core.client.ask(true, |view, until| {
            let id = self.core.id_of(&parent, view, until)?;
            let request = Request::Lookup { parent: id, name: name.clone(), by: by.clone() };
            let attr = attr_of(self.core.call(view, &request, until))?;
            Ok(self.core.known.remember(attr, view, (&parent, name), by.uid).0)
        })
    }

    fn forget(&self, node: u64, times: u64) -> Forgotten {
        self.core.forget(node, times);
        Forgotten::default()
    }

    fn attr(&self, node: u64, uid: u32) -> TreeResult<Attr> {
        if node != ROOT {
            let ask = |node| Request::Attr { node, uid };
            return Ok(Attr { node, ..self.about(node, true, ask, attr_of)? });
        }
        let root = &self.core.root_attr;
        // The path to the mount's status goes through the root, and the status explains why the target is gone.
        if self.core.client.is_disconnected() { Ok(root.last()) } else { root.now() }
    }

    fn change(&self, number: u64, change: &AttrChange, by: &Caller) -> TreeResult<Attr> {
        let node = self.core.known.node(number)?;
        let attr = self.core.client.ask(true, |view, until| {
            let id = self.core.id_of(&node, view, until)?;
            let request = Request::Change { node: id, file: None, change: *change, by: by.clone() };
            let attr = attr_of(self.core.call(view, &request, until))?;
            node.changed(view);
            Ok(attr)
        })?;
        Ok(Attr { node: number, ..attr })
    }

    fn read_link(&self, node: u64, uid: u32) -> TreeResult<Vec<u8>> {
        self.about(
            node,
            true,
            |node| Request::ReadLink { node, uid },
            |called| match called?.0 {
                Reply::Text(text) => Ok(text),
                _ => Err(Errno::PROTO.into()),
            },
        )
    }

    fn make(&self, parent: u64, name: &Name, make: &Make, by: &Caller) -> TreeResult<Attr> {
        let parent = self.core.known.node(parent)?;
        self.in_folder(&parent, false, |id, view, until| {
            let make = make.clone();
            let request = Request::Make { parent: id, name: name.clone(), make, by: by.clone() };
            let attr = attr_of(self.core.call(view, &request, until))?;
            Ok(self.core.known.remember(attr, view, (&parent, name), by.uid).0)
        })
    }

    fn create(
        &self,
        parent: u64,
        name: &Name,
        mode: u32,
        access: OpenMode,
        exclusive: bool,
        by: &Caller,
    ) -> TreeResult<(Attr, Arc<dyn OpenFile>)> {
        let parent = self.core.known.node(parent)?;
        self.in_folder(&parent, !exclusive, |id, view, until| {
            let (named, opener) = (name.clone(), (access, by.clone()));
            let caller = by.clone();
            let request = Request::Create { parent: id, name: named, mode, access, exclusive, by: caller };
            let Reply::Created { attr, file } = self.core.call(view, &request, until)?.0 else {
                return Err(Errno::PROTO.into());
            };
            let (attr, node) = self.core.known.remember(attr, view, (&parent, name), by.uid);
            node.changed(view);
            let open = RemoteFile::new(&self.core, &node, opener, (view.epoch, file), true);
            Ok((attr, Arc::new(open) as Arc<dyn OpenFile>))
        })
    }

    fn remove(&self, parent: u64, name: &Name, folder: bool, by: &Caller) -> TreeResult<()> {
        let parent = self.core.known.node(parent)?;
        self.in_folder(&parent, false, |id, view, until| {
            let request = Request::Remove { parent: id, name: name.clone(), folder, by: by.clone() };
            done(self.core.call(view, &request, until))
        })
    }

    fn rename(&self, from: (u64, &Name), to: (u64, &Name), flags: u32, by: &Caller) -> TreeResult<()> {
        let (parent, folder) = (self.core.known.node(from.0)?, self.core.known.node(to.0)?);
        self.in_folder(&parent, false, |id, view, until| {
            let to_id = self.core.id_of(&folder, view, until)?;
            let (name, new_name, by) = (from.1.clone(), to.1.clone(), by.clone());
            let request = Request::Rename { parent: id, name, to: to_id, new_name, flags, by };
            done(self.core.call(view, &request, until))?;
            folder.changed(view);
            Ok(())
        })?;
        let exchanged = flags & rustix::fs::RenameFlags::EXCHANGE.bits() != 0;
        self.core.known.moved((&parent, from.1), (&folder, to.1), exchanged);
        Ok(())
    }

    fn link(&self, node: u64, parent: u64, name: &Name, by: &Caller) -> TreeResult<Attr> {
        let (node, parent) = (self.core.known.node(node)?, self.core.known.node(parent)?);
        self.in_folder(&parent, false, |id, view, until| {
            let node = self.core.id_of(&node, view, until)?;
            let request = Request::Link { node, parent: id, name: name.clone(), by: by.clone() };
            let attr = attr_of(self.core.call(view, &request, until))?;
            Ok(self.core.known.remember(attr, view, (&parent, name), by.uid).0)
        })
    }

    fn list(&self, node: u64, from: u64, by: &Caller) -> TreeResult<FolderNames> {
        self.about(
            node,
            true,
            |node| Request::List { node, from, by: by.clone() },
            |called| match called?.0 {
                // An offset that does not advance would be requested for ever.
                Reply::Names { names, next } if next.is_none() || !names.is_empty() => {
                    Ok(FolderNames { names, next })
                }
                _ => Err(Errno::PROTO.into()),
            },
        )
    }

    fn sync_folder(&self, node: u64, uid: u32) -> TreeResult<()> {
        let node = self.core.known.node(node)?;
        self.core.client.ask(true, |view, until| {
            node.check_boot(view)?;
            let before = node.take_unsynced();
            let id = self.core.id_of(&node, view, until);
            let request = |node| Request::SyncFolder { node, uid };
            let synced = id.and_then(|node| done(self.core.call(view, &request(node), until)));
            synced.inspect_err(|_| node.restore(before))
        })
    }

    fn xattr(&self, node: u64, ask: &Xattr, by: &Caller) -> TreeResult<Vec<u8>> {
        if !ask.is_sound() {
            return Err(Errno::TOOBIG);
        }
        if node == ROOT && matches!(ask, Xattr::Get { name } if name == ACCESS_LIST.as_bytes()) {
            return self.core.root_list.now()?;
        }
        // Setting or removing an attribute twice may fail, depending on the flags.
        let repeatable = matches!(ask, Xattr::Get { .. } | Xattr::List);
        self.about(
            node,
            repeatable,
            |node| Request::Xattr { node, ask: ask.clone(), by: by.clone() },
            text_of,
        )
    }

    fn space(&self, uid: u32) -> TreeResult<FsSpace> {
        let request = Request::Space { uid };
        self.core.client.ask(true, |view, until| match self.core.call(view, &request, until)?.0 {
            Reply::Space(space) => Ok(space),
            _ => Err(Errno::PROTO.into()),
        })
    }

    fn open(&self, node: u64, access: OpenMode, by: &Caller) -> TreeResult<Arc<dyn OpenFile>> {
        let node = self.core.known.node(node)?;
        self.core.client.ask(true, |view, until| {
            let id = self.core.id_of(&node, view, until)?;
            let request = Request::Open { node: id, access, again: false, by: by.clone() };
            let (file, has_name) = opened(self.core.call(view, &request, until))?;
            if access.truncate {
                node.changed(view);
            }
            let opener = (access, by.clone());
            let open = RemoteFile::new(&self.core, &node, opener, (view.epoch, file), has_name);
            Ok(Arc::new(open) as Arc<dyn OpenFile>)
        })
    }
}

fn list_of(node: u64) -> Request {
    Request::Xattr { node, ask: Xattr::Get { name: ACCESS_LIST.as_bytes().to_vec() }, by: Caller::ROOT }
}

/// A missing list is an answer too. Other errors pass.
fn fact<T>(answer: TreeResult<T>) -> TreeResult<TreeResult<T>> {
    match answer {
        Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(answer),
        Err(error) => Err(error),
    }
}

fn text_of(called: Called) -> std::result::Result<Vec<u8>, RequestError> {
    match called?.0 {
        Reply::Text(bytes) => Ok(bytes),
        _ => Err(Errno::PROTO.into()),
    }
}

pub(super) fn opened(called: Called) -> std::result::Result<(u64, bool), RequestError> {
    match called?.0 {
        Reply::Opened { file, has_name } => Ok((file, has_name)),
        _ => Err(Errno::PROTO.into()),
    }
}
