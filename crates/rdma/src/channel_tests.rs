//! Ends of connections, and access to memory, with a device that does no work.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;
use crate::memory::{Access, MemoryRef};
use crate::pool::Pool;
use crate::verbs::Fake;

const LONG: Duration = Duration::from_secs(30);
const READ_AND_WRITE: u32 = 6;

/// A connection on a device that does no work, and the socket that shows the other side's presence.
fn connected(nic: &Arc<Nic>) -> (Channel, UnixStream) {
    let prepared = PreparedChannel::new(nic, ChannelSize::default()).unwrap();
    let other = *prepared.endpoint();
    let (met, far) = UnixStream::pair().unwrap();
    (prepared.connect(&other, met.into()).unwrap(), far)
}

fn memory() -> MemoryRef {
    Arc::new(HostMem::anonymous(4096).unwrap())
}

#[test]
fn memory_is_returned_only_after_the_pair_is_destroyed() {
    let fake = Fake::new();
    let nic = Nic::of_device(fake.device());
    let (channel, _far) = connected(&nic);
    let own = nic.register(&memory(), Access::Own).unwrap();
    let to = RemoteMemory { addr: 0, len: 4096, rkey: 1 };
    fake.hold();
    std::thread::scope(|scope| {
        let put = |limit| channel.put(&own, 0, to, Deadline::after(limit)).is_err();
        // Two time out together, and two more run into the same end.
        let first = scope.spawn(move || (put(Duration::from_millis(20)), fake.has_destroyed()));
        let second = scope.spawn(move || (put(Duration::from_millis(20)), fake.has_destroyed()));
        let patient = scope.spawn(move || (put(LONG), fake.has_destroyed()));
        fake.wait_until_destroying();
        let closing = scope.spawn(|| {
            channel.close("it is closed");
            (true, fake.has_destroyed())
        });
        // Long enough for all of them to end, if nothing blocks them.
        std::thread::sleep(Duration::from_millis(300));
        fake.allow();
        for thread in [first, second, patient, closing] {
            let (failed, destroyed) = thread.join().unwrap();
            assert!(failed && destroyed, "memory was returned while the device could reach it");
        }
    });
}

#[test]
fn peers_have_no_access_before_let_in() {
    let fake = Fake::new();
    let nic = Nic::of_device(fake.device());
    let (channel, _far) = connected(&nic);
    assert_eq!(fake.pair_rights(), [0]);
    channel.let_in().unwrap();
    assert_eq!(fake.pair_rights(), [0, READ_AND_WRITE]);
    channel.close("it is closed");
    assert!(matches!(channel.let_in(), Err(Error::Broken(_))));
}

/// It completes a receive, but the slot holds bytes of another message.
#[test]
fn a_write_with_an_immediate_number_is_no_message() {
    for (opcode, is_message) in [(128, true), (129, false)] {
        let fake = Fake::new();
        let nic = Nic::of_device(fake.device());
        let (channel, _far) = connected(&nic);
        fake.complete_receive(RECEIVE, opcode, 4);
        let received = channel.receive(Deadline::after(LONG));
        assert_eq!(matches!(received, Ok(Some(_))), is_message);
        assert_eq!(matches!(received, Err(Error::Broken(_))), !is_message);
    }
}

#[test]
fn memory_is_reached_by_others_only_where_it_is_exposed() {
    let fake = Fake::new();
    let nic = Nic::of_device(fake.device());
    let _own = nic.cached_whole(&memory()).unwrap();
    let (_channel, _far) = connected(&nic);
    assert_eq!(fake.memory_rights().len(), 2);
    assert!(fake.memory_rights().iter().all(|rights| rights & READ_AND_WRITE == 0));
    let exposing = nic.for_exposing().unwrap();
    let _exposed = exposing.cached_whole(&memory()).unwrap();
    assert_eq!(fake.memory_rights()[2] & READ_AND_WRITE, READ_AND_WRITE);
    // Messages of such a connection are not exposed either.
    let (_channel, _far) = connected(&exposing);
    assert_eq!(fake.memory_rights()[3] & READ_AND_WRITE, 0);
}

/// A program's memory may be terabytes without a page.
#[test]
fn pages_that_do_not_exist_are_not_made_for_a_card() {
    const WINDOW: usize = 4 << 20;
    let nic = Nic::of_device(Fake::new().device()).for_exposing().unwrap();
    let mem = HostMem::anonymous(3 * WINDOW).unwrap();
    let sparse: MemoryRef = Arc::new(mem.clone());
    let first = WINDOW as u64 + 5000;
    let held = nic.cached_part(&sparse, first..first + 100).unwrap();
    assert_eq!((held.len(), held.offset()), (4096, 904));
    let at = held.remote(held.offset(), 100).unwrap().addr;
    assert_eq!(at, mem.host_ptr() as u64 + first);
    assert!(held.remote(held.offset(), 4096).is_err(), "more is exposed than was asked for");
    // Once they exist, what lies around them is registered too, and found again.
    mem.fill(WINDOW, WINDOW, 1).unwrap();
    let held = nic.cached_part(&sparse, first..first + 9000).unwrap();
    assert_eq!((held.len(), held.offset()), (WINDOW as u64, 5000));
    let misses = nic.account().misses;
    let end = 2 * WINDOW as u64;
    assert_eq!(nic.cached_part(&sparse, end - 1..end).unwrap().offset(), WINDOW as u64 - 1);
    assert_eq!((nic.account().misses, nic.account().bytes), (misses, 4096 + WINDOW as u64));
    assert!(nic.cached_part(&sparse, 3 * end..4 * end).is_err());
    drop((held, sparse));
    nic.forget_whole(&(Arc::new(mem) as MemoryRef));
    assert_eq!(nic.account().bytes, 0);
}

#[test]
fn both_sides_of_a_connection_know_the_same_ends() {
    let nic = Nic::of_device(Fake::new().device());
    let [near, far] = [(); 2].map(|()| PreparedChannel::new(&nic, ChannelSize::default()).unwrap());
    let [of_near, of_far] = [*near.endpoint(), *far.endpoint()];
    let (met, other) = UnixStream::pair().unwrap();
    let near = near.connect(&of_far, met.into()).unwrap();
    let far = far.connect(&of_near, other.into()).unwrap();
    assert_eq!(near.ends(), far.ends());
    assert_ne!(near.ends(), connected(&nic).0.ends());
}

/// The device may still write for a pair that is not destroyed: into receive slots, and into memory of transfers.
#[test]
fn memory_of_a_pair_that_is_not_destroyed_is_never_used_again() {
    for refuses in [false, true] {
        let fake = Fake::new();
        let nic = Nic::of_device(fake.device());
        let (channel, _far) = connected(&nic);
        let (used, other) = (memory(), memory());
        let own = Arc::new(nic.register(&used, Access::Own).unwrap());
        let unused = Arc::new(nic.register(&other, Access::Own).unwrap());
        let pools = [&own, &unused].map(|memory| Pool::new(memory.clone(), 2048).unwrap());
        let slots = pools.each_ref().map(|pool| pool.take(Deadline::after(LONG)).unwrap());
        let messages = Arc::downgrade(channel.shared.registered.registration());
        if refuses {
            fake.refuse();
        }
        let from = RemoteMemory { addr: 0, len: 2048, rkey: 1 };
        let late = channel.get(slots[0].memory(), slots[0].offset(), from, Deadline::after(Duration::ZERO));
        assert!(late.is_err() && channel.is_broken() && fake.has_destroyed() != refuses);
        drop(slots);
        let free = pools.each_ref().map(|pool| {
            let take = || pool.take(Deadline::after(Duration::ZERO)).ok();
            [take(), take(), take()].iter().flatten().count()
        });
        assert_eq!(free, [if refuses { 1 } else { 2 }, 2]);
        assert_eq!(messages.upgrade().unwrap().is_lost(), refuses);
        drop((channel, own, unused, pools, nic));
        // What this test holds, and what is leaked to the device.
        assert_eq!([Arc::strong_count(&used), Arc::strong_count(&other)], [1 + usize::from(refuses), 1]);
    }
}

/// An admitted target may still use its keys with such a pair. No exposed memory is in a transfer of this side.
#[test]
fn exposed_memory_of_a_pair_that_is_not_destroyed_is_never_used_again() {
    for refuses in [false, true] {
        let fake = Fake::new();
        let plain = Nic::of_device(fake.device());
        let [mount, elsewhere] = [(); 2].map(|()| plain.for_exposing().unwrap());
        let (channel, _far) = connected(&mount);
        channel.let_in().unwrap();
        let all: [MemoryRef; 4] = std::array::from_fn(|_| memory());
        let [cached, held, own, other] = &all;
        drop(mount.cached_whole(cached).unwrap());
        let still_held = mount.cached_whole(held).unwrap();
        let unexposed = mount.register(own, Access::Own).unwrap();
        drop(elsewhere.cached_whole(other).unwrap());
        if refuses {
            fake.refuse();
        }
        channel.close("it is closed");
        assert_ne!(fake.has_destroyed(), refuses);
        // Neither previously exposed memory nor anything new is exposed again; another mount still works.
        assert_eq!([cached, &memory()].map(|it| mount.cached_whole(it).is_err()), [refuses; 2]);
        assert_eq!(mount.register(&memory(), Access::Exposed).is_err(), refuses);
        assert!(elsewhere.cached_whole(other).is_ok());
        drop((still_held, unexposed));
        mount.forget_whole(cached);
        mount.forget_whole(held);
        elsewhere.forget_whole(other);
        // What this test holds, and what is leaked to the device.
        let left = 1 + usize::from(refuses);
        assert_eq!(all.each_ref().map(Arc::strong_count), [left, left, 1, 1]);
    }
}

#[test]
fn a_pair_that_was_never_connected_keeps_its_memory_too() {
    let fake = Fake::new();
    let nic = Nic::of_device(fake.device());
    fake.refuse();
    let domain = Arc::downgrade(&nic.domain);
    drop((PreparedChannel::new(&nic, ChannelSize::default()).unwrap(), nic));
    assert!(domain.strong_count() > 0, "the domain of a live pair was released");
}

#[test]
fn a_thread_that_has_acted_as_a_user_uses_a_connection_and_makes_none() {
    let fake = Fake::new();
    let nic = Nic::of_device(fake.device());
    let (channel, _far) = connected(&nic);
    let prepared = PreparedChannel::new(&nic, ChannelSize::default()).unwrap();
    let (other, (met, _)) = (*prepared.endpoint(), UnixStream::pair().unwrap());
    std::thread::scope(|scope| {
        let acted = scope.spawn(|| {
            identity::note_change();
            channel.let_in().unwrap();
            channel.send(4, Deadline::after(LONG), |mem, at| Ok(mem.write(at, b"word")?)).unwrap();
            let own = nic.register(&memory(), Access::Own).unwrap();
            let to = RemoteMemory { addr: 0, len: 4096, rkey: 1 };
            // It is posted: the device never completes it, so it times out.
            let put = channel.put(&own, 0, to, Deadline::after(Duration::from_millis(20)));
            assert!(matches!(put, Err(Error::TimedOut(_))), "{put:?}");
            assert!(fake.has_destroyed());
            assert!(matches!(prepared.connect(&other, met.into()), Err(Error::ActedAsUser { .. })));
        });
        acted.join().unwrap();
    });
}
