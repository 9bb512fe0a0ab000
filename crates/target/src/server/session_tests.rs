//! Tests of the files and answers of a session.

use super::*;
use crate::tcp::{TcpAcceptor, TcpConnector};
use crate::transport::{Acceptor, Connector, Link};
use crate::tree::FolderRules;
use crate::wire::{Caller, OpenMode};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn link() -> (Box<dyn Link>, Box<dyn Link>) {
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let near =
        TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap().connect(0, TEST_TIMEOUT).unwrap();
    (acceptor.accept(TEST_TIMEOUT).unwrap().unwrap(), near)
}

fn session(shares: &Arc<Shares>, number: u32, most_files: usize) -> ClientSession {
    let folder = std::fs::File::open("/").unwrap().into();
    let folder = Folder::new(folder, FolderRules { for_others: true, most_open: 64 }).unwrap();
    ClientSession::new(([1; 16], [2; 16]), number, folder, (shares.clone(), most_files))
}

#[test]
fn open_files_are_limited_per_user() {
    let shares = Arc::new(Shares::new(64));
    let (this, other) = (session(&shares, 0, 1024), session(&shares, 1, 1024));
    let file = Arc::new(Local::new(std::fs::File::open("/dev/null").unwrap()));
    let open = |session: &ClientSession, uid, again| {
        session.add_file(SessionFile { file: file.clone(), uid, syncs: false }, again)
    };
    let many = |session: &ClientSession, uid| {
        std::iter::from_fn(|| open(session, uid, false).ok()).collect::<Vec<_>>()
    };
    // The client itself may have half of the budget.
    let first = many(&this, 1001);
    assert_eq!([first.len(), many(&this, 1002).len(), many(&this, 1003).len()], [16, 8, 4]);
    assert_eq!(open(&this, 1001, false).err(), Some(Errno::MFILE));
    // After a restart of the target, users get back what they had.
    assert!(open(&this, 1001, true).is_ok());
    assert_eq!(many(&other, 1001).len(), 9);
    for number in first {
        this.close_file(number).unwrap();
    }
    assert_eq!(many(&this, 1001).len(), 7);
    // Root may have the rest, but no more.
    assert!(!many(&this, 0).is_empty());
    assert_eq!(open(&this, 0, true).err(), Some(Errno::MFILE));
    drop((this, other));
    assert_eq!(shares.taken(), 0);
    // Without other clients, the session's own limit counts.
    let alone = session(&Arc::new(Shares::new(1 << 20)), 0, 16);
    assert_eq!([1001, 1002, 0].map(|uid| many(&alone, uid).len()), [8, 4, 4]);
}

#[test]
fn requests_of_a_killed_client_are_abandoned_unless_repeated() {
    let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
    let (links, _others): (Vec<_>, Vec<_>) = (0..2).map(|_| link()).unzip();
    let connections: Vec<_> =
        links.into_iter().map(|link| Connection::new(link.into(), session.clone(), TEST_TIMEOUT)).collect();
    let [first, second] = &connections[..] else { unreachable!() };
    let request = Request::Write { file: 1, at: 0, len: 1, from: None };
    let admitted = |id, by| session.admit(id, 0, &request, by);
    let begin = |id| session.begin(id, &request, first);
    assert!(matches!(admitted(0, first), Admit::Do));
    assert!(!first.has_ended());
    // Repeated before its turn: it keeps its turn, although the first connection has ended.
    assert!(matches!(admitted(1, first), Admit::Do));
    assert!(matches!(admitted(1, second), Admit::Wait));
    assert!(matches!(admitted(2, first), Admit::Do));
    assert!(matches!(admitted(2, second), Admit::Wait));
    // A dead connection may deliver an earlier request late.
    assert!(matches!(admitted(3, second), Admit::Do));
    assert!(matches!(admitted(3, first), Admit::Wait));
    first.end();
    assert_eq!([0, 1, 3].map(begin), [Begin::Abandoned, Begin::Do, Begin::Do]);
    // Abandoned and repeated, it is executed, since it was not before.
    assert!(matches!(admitted(0, second), Admit::Do));
    assert_eq!(begin(0), Begin::Do);
    let looks = Request::Read { file: 1, at: 0, len: 1, into: None };
    assert_eq!([first, second].map(|by| session.begin(4, &looks, by)), [Begin::Abandoned, Begin::Do]);
    // A repeated request is abandoned, too, once all connections have ended.
    second.end();
    assert_eq!(begin(2), Begin::Abandoned);
    // Running requests are waited for, queued ones are not.
    assert!(matches!(admitted(5, second), Admit::Do));
    assert!(!session.end(Instant::now()));
    [0, 1, 3].into_iter().for_each(|id| drop(session.finish(id, &request, &Reply::Done)));
    assert!(session.end(Instant::now()));
    assert_eq!(begin(5), Begin::Abandoned);
}

#[test]
fn outstanding_requests_are_not_forgotten() {
    let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
    let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
    let write = Request::Write { file: 1, at: 0, len: 1, from: None };
    let admitted = |id, done| session.admit(id, done, &write, &connection);
    (0..10).for_each(|id| assert!(matches!(admitted(id, 0), Admit::Do)));
    (2..10).for_each(|id| drop(session.finish(id, &write, &Reply::Done)));
    // The client has all answers but those to 0 and 1, which are running, and to 2.
    session.outstanding(SPAN + 5, &[0, 1, 2], &[]).unwrap();
    assert!(matches!(admitted(0, 0), Admit::Wait) && matches!(admitted(2, 0), Admit::Answer(_)));
    let begin = |id| session.begin(id, &write, &connection);
    assert!(matches!(admitted(3, 0), Admit::Drop));
    assert_eq!([1, 3].map(begin), [Begin::Do, Begin::Cancelled]);
    assert_eq!(lock(&session.answers).known.len(), 3);
    assert!(matches!(admitted(2 * SPAN, SPAN), Admit::Do));
    assert!(matches!(admitted(2 * SPAN + 5, SPAN), Admit::Violation(_)));
    assert!(session.finish(0, &write, &Reply::Done).is_some());
    assert!(matches!(admitted(0, 0), Admit::Answer(_)));
    // An outdated report is ignored.
    session.outstanding(SPAN + 4, &[], &[]).unwrap();
    assert!(matches!(admitted(0, 0), Admit::Answer(_)));
    // Request 1 is cancelled while it runs: no change may be executed until it ends.
    session.outstanding(SPAN + 6, &[], &[]).unwrap();
    assert!(matches!(admitted(0, 0), Admit::Drop));
    assert!(matches!(admitted(2 * SPAN + 1, 0), Admit::Busy));
    drop(session.finish(1, &write, &Reply::Done));
    assert!(matches!(admitted(2 * SPAN + 1, 0), Admit::Do));
    // A request cancelled before its turn is never executed, and blocks nothing.
    session.outstanding(2 * SPAN + 2, &[], &[]).unwrap();
    assert!(matches!(admitted(2 * SPAN + 3, 0), Admit::Do));
    assert_eq!(begin(2 * SPAN + 1), Begin::Cancelled);
    assert_eq!(session.outstanding(9, &vec![0; 5000], &[]).err(), Some(Errno::INVAL));
}

#[test]
fn files_of_cancelled_answers_are_released_together() {
    let session = Arc::new(session(&Arc::new(Shares::new(1 << 20)), 0, 1024));
    let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
    let name = crate::wire::Name::new(b"name").unwrap();
    let lookup = Request::Lookup { parent: ROOT, name, by: Caller::ROOT };
    let access = OpenMode::default();
    let open = Request::Open { node: ROOT, access, again: false, by: Caller::ROOT };
    let attr = session.folder.attr(ROOT, 0).unwrap();
    let file = Arc::new(Local::new(std::fs::File::open("/dev/null").unwrap()));
    let give_up = |id, request: &Request, reply: &Reply| {
        assert!(matches!(session.admit(id, 0, request, &connection), Admit::Do));
        let over = || session.finish(id, request, reply).unwrap().1;
        // Some are answered before the client cancels them, the others after.
        let was_wanted = id % 4 < 2 && over();
        session.outstanding(id + 1, &[], &[id]).unwrap();
        assert!(was_wanted || !over());
    };
    let mut calls = 0;
    for id in 0..10 {
        let file = SessionFile { file: file.clone(), uid: 0, syncs: false };
        let file = session.add_file(file, false).unwrap();
        give_up(2 * id, &open, &Reply::Opened { file, has_name: true });
        give_up(2 * id + 1, &lookup, &Reply::Attr(crate::wire::Attr { node: 7, ..attr.clone() }));
        calls += usize::from(session.wants_release());
    }
    // Answering closes nothing, because that may take long.
    let nodes = lock(&session.unheard).nodes.clone();
    assert_eq!((calls, lock(&session.files).len(), nodes), (1, 10, BTreeMap::from([(7, 10)])));
    session.release_unheard();
    assert!(lock(&session.files).is_empty() && !session.wants_release());
    // The number of waiting files is bounded.
    for id in 20..MAX_UNHEARD as u64 + 30 {
        give_up(id, &lookup, &Reply::Attr(crate::wire::Attr { node: id, ..attr.clone() }));
    }
    assert!(session.wants_release() && !session.wants_release());
    assert_eq!(lock(&session.unheard).nodes.len(), MAX_UNHEARD);
}

#[test]
fn a_late_report_does_not_revive_answered_requests() {
    let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
    let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
    let write = Request::Write { file: 1, at: 0, len: 1, from: None };
    let admitted = |id, done| session.admit(id, done, &write, &connection);
    (0..6).for_each(|id| assert!(matches!(admitted(id, 0), Admit::Do)));
    (0..6).for_each(|id| drop(session.finish(id, &write, &Reply::Done)));
    // The client got the answer to 3 after it wrote this report, and reports that before it arrives.
    assert!(matches!(admitted(7, 6), Admit::Do));
    session.outstanding(5, &[3], &[]).unwrap();
    // A request that was repeated over another connection may still arrive over the first.
    assert!(matches!(admitted(3, 0), Admit::Drop), "a write would be executed twice");
}

#[test]
fn a_read_that_could_not_reach_the_client_keeps_its_error() {
    let session = Arc::new(session(&Arc::new(Shares::new(8)), 0, 8));
    let connection = Connection::new(link().0.into(), session.clone(), TEST_TIMEOUT);
    let request = Request::Read { file: 1, at: 0, len: 1, into: None };
    assert!(matches!(session.admit(0, 0, &request, &connection), Admit::Do));
    assert!(matches!(session.admit(0, 0, &request, &connection), Admit::Do));
    let failed = Reply::Failed { errno: Errno::COMM.raw_os_error() };
    session.keep(0, &failed);
    let again = session.admit(0, 0, &request, &connection);
    assert!(matches!(again, Admit::Answer(reply) if format!("{reply:?}") == format!("{failed:?}")));
    // An answer that the client does not wait for is not recorded.
    assert!(matches!(session.admit(1, 1, &request, &connection), Admit::Do));
    session.keep(0, &failed);
    assert!(lock(&session.answers).known.is_empty());
}
