//! Maps user IDs to persons, for whom resources count: one person may act under many user IDs.
//!
//! With `newuidmap`, any user can act under the subordinate IDs that `/etc/subuid` grants them, usually 65 536. What
//! those IDs use counts for the person. Permissions are not affected: for them each ID is a user.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use onehop_target::shares::{Payer, Shares};

/// The file that grants subordinate user IDs.
pub(crate) const SUBUIDS: &str = "/etc/subuid";
/// Maps the names in it to user IDs.
const PASSWD: &str = "/etc/passwd";
/// IDs of a container. Root's containers share one grant, but each counts for itself.
const OF_A_CONTAINER: u32 = 1 << 16;

/// A range of subordinate IDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Grant {
    first: u32,
    last: u32,
    /// The highest `last` of all grants up to this one.
    reach: u32,
    /// `None` for root, or if the name is unknown.
    person: Option<u32>,
    is_root: bool,
}

/// Which person a user ID belongs to.
#[derive(Clone, Default)]
pub(crate) struct Persons {
    /// Sorted by their first IDs.
    grants: Arc<[Grant]>,
}

impl Persons {
    /// Reads this machine's grants once. Without the file each ID is a person.
    pub fn read(subuids: &Path) -> Self {
        let text = |path: &Path| {
            std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
        };
        Self::parse(&text(subuids), &text(Path::new(PASSWD)))
    }

    fn parse(subuids: &str, passwd: &str) -> Self {
        let users: HashMap<&str, u32> = passwd.lines().filter_map(user).collect();
        let mut grants: Vec<_> = subuids.lines().filter_map(|line| grant(line, &users)).collect();
        // Where two overlap, the one that starts later counts: it is more specific.
        grants.sort_by_key(|grant| grant.first);
        let mut reach = 0;
        for grant in &mut grants {
            reach = reach.max(grant.last);
            grant.reach = reach;
        }
        Self { grants: grants.into() }
    }

    /// The user ID of the person that an ID belongs to.
    pub fn of(&self, uid: u32) -> u32 {
        let behind = self.grants.partition_point(|grant| grant.first <= uid);
        let mut before = self.grants[..behind].iter().rev().take_while(|grant| uid <= grant.reach);
        let Some(grant) = before.find(|grant| uid <= grant.last) else { return uid };
        match grant.person {
            Some(person) => person,
            None if grant.is_root => uid - (uid - grant.first) % OF_A_CONTAINER,
            None => grant.first,
        }
    }

    /// The same, as a function for [`Shares`].
    pub fn payer(&self) -> Payer<u32> {
        let this = self.clone();
        Arc::new(move |uid| this.of(uid))
    }

    /// A budget that persons share. Root and the daemon's user may use all of it.
    pub fn shares(&self, most: u64) -> Shares {
        let privileged = [0, rustix::process::geteuid().as_raw()];
        let mut shares = Shares::new(most).with_privileged(privileged);
        shares.set_payer(self.payer());
        shares
    }
}

fn user(line: &str) -> Option<(&str, u32)> {
    let mut fields = line.split(':');
    let (name, _, uid) = (fields.next()?, fields.next()?, fields.next()?);
    Some((name, uid.parse().ok()?))
}

/// Parses `name:first:count`; an ID may stand for the name.
fn grant(line: &str, users: &HashMap<&str, u32>) -> Option<Grant> {
    let mut fields = line.trim().split(':');
    let (name, first, count) = (fields.next()?, fields.next()?, fields.next()?);
    let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
    let last = first.saturating_add(count.checked_sub(1)?);
    let uid = name.parse().ok().or_else(|| users.get(name).copied());
    Some(Grant { first, last, reach: last, person: uid.filter(|uid| *uid != 0), is_root: uid == Some(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000:Alice:/home/alice:/bin/sh\nbroken\n";
    const SUBUIDS: &str = "alice:100000:65536\n# a remark\n1001:165536:65536\nroot:1000000:1000000000\n\
                           stranger:300000:10\nbad:1\nbad:x:y\nbad:5:0\n1002:4294967290:100\n\
                           alice:400000:1000\n1001:400100:10\n";

    #[test]
    fn subordinate_ids_belong_to_their_person() {
        let persons = Persons::parse(SUBUIDS, PASSWD);
        let numbers = [1000, 99_999, 100_000, 165_535, 165_536, 231_071, 231_072, u32::MAX];
        let owners = [1000, 99_999, 1000, 1000, 1001, 1001, 231_072, 1002];
        assert_eq!(numbers.map(|uid| persons.of(uid)), owners);
        // The name is unknown, so each grant is a person.
        assert_eq!([300_000, 300_009, 300_010].map(|uid| persons.of(uid)), [300_000, 300_000, 300_010]);
        // Each of root's containers.
        assert_eq!([1_000_000, 1_065_535].map(|uid| persons.of(uid)), [1_000_000; 2]);
        assert_eq!(persons.of(1_065_536), 1_065_536);
        // Nested grants.
        assert_eq!(
            [400_099, 400_100, 400_110, 401_000].map(|uid| persons.of(uid)),
            [1000, 1001, 1000, 401_000]
        );
        assert_eq!(persons.of(0), 0);
        assert_eq!(Persons::read(Path::new("/nowhere")).of(100_000), 100_000);
    }

    #[test]
    fn ids_of_one_person_share_one_budget() {
        let persons = Persons::parse(SUBUIDS, PASSWD);
        let shares = persons.shares(1 << 10);
        let all = |uid| std::iter::from_fn(|| shares.take(uid, 1).then_some(())).count();
        let of_alice: usize = (100_000..100_040).map(all).sum::<usize>() + all(1000);
        assert_eq!((of_alice, all(1003)), (512, 256));
        // What one of her IDs releases, another may take.
        shares.put_back(100_000, 16);
        assert_eq!((shares.taken_by(100_007), all(100_039)), (496, 0));
        shares.put_back(1000, 300);
        assert!(all(100_001) > 0);
        // Root's containers have no privilege.
        assert!(shares.room(1_000_000) < shares.room(0));
    }
}
