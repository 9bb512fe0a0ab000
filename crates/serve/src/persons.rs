//! Who pays for what a user number takes: one person may act under many numbers.
//!
//! By `newuidmap`, anybody gets the subordinate numbers that `/etc/subuid` grants them, 65 536 mostly. What such numbers take counts for
//! the person. Permissions are another matter: for those each number is a user.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use onehop_target::shares::{Payer, Shares};

/// The file that grants subordinate numbers.
pub(crate) const SUBUIDS: &str = "/etc/subuid";
/// It names most persons by the names that this one knows.
const PASSWD: &str = "/etc/passwd";
/// Numbers of a container: root's containers, which have nothing to do with one another, share one grant.
const OF_A_CONTAINER: u32 = 1 << 16;

/// Subordinate numbers in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Grant {
    first: u32,
    last: u32,
    /// The last number of all grants up to this one.
    reach: u32,
    /// None where that is root, or nobody knows the name.
    person: Option<u32>,
    is_root: bool,
}

/// Which person a user number belongs to.
#[derive(Clone, Default)]
pub(crate) struct Persons {
    /// By their first numbers.
    grants: Arc<[Grant]>,
}

impl Persons {
    /// Reads the grants of this machine, as they are now. Without that file each number is a person.
    pub fn read(subuids: &Path) -> Self {
        let text = |path: &Path| {
            std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
        };
        Self::parse(&text(subuids), &text(Path::new(PASSWD)))
    }

    fn parse(subuids: &str, passwd: &str) -> Self {
        let users: HashMap<&str, u32> = passwd.lines().filter_map(user).collect();
        let mut grants: Vec<_> = subuids.lines().filter_map(|line| grant(line, &users)).collect();
        // Of two that overlap, the one that begins later counts where they do: it is the more particular one.
        grants.sort_by_key(|grant| grant.first);
        let mut reach = 0;
        for grant in &mut grants {
            reach = reach.max(grant.last);
            grant.reach = reach;
        }
        Self { grants: grants.into() }
    }

    /// The number of the person that a number belongs to.
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

    /// The same, for supplies.
    pub fn payer(&self) -> Payer<u32> {
        let this = self.clone();
        Arc::new(move |uid| this.of(uid))
    }

    /// A supply that persons share. Root may have all of it, and so may the user whose daemon this is.
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

/// `name:first:count`; a number may stand for the name.
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
    fn subordinate_numbers_are_their_person_s() {
        let persons = Persons::parse(SUBUIDS, PASSWD);
        let numbers = [1000, 99_999, 100_000, 165_535, 165_536, 231_071, 231_072, u32::MAX];
        let owners = [1000, 99_999, 1000, 1000, 1001, 1001, 231_072, 1002];
        assert_eq!(numbers.map(|uid| persons.of(uid)), owners);
        // Nobody knows whose these are: one person's, in any case.
        assert_eq!([300_000, 300_009, 300_010].map(|uid| persons.of(uid)), [300_000, 300_000, 300_010]);
        // Each of root's containers.
        assert_eq!([1_000_000, 1_065_535].map(|uid| persons.of(uid)), [1_000_000; 2]);
        assert_eq!(persons.of(1_065_536), 1_065_536);
        // One within another.
        assert_eq!(
            [400_099, 400_100, 400_110, 401_000].map(|uid| persons.of(uid)),
            [1000, 1001, 1000, 401_000]
        );
        assert_eq!(persons.of(0), 0);
        assert_eq!(Persons::read(Path::new("/nowhere")).of(100_000), 100_000);
    }

    #[test]
    fn many_numbers_of_one_person_have_one_share() {
        let persons = Persons::parse(SUBUIDS, PASSWD);
        let shares = persons.shares(1 << 10);
        let all = |uid| std::iter::from_fn(|| shares.take(uid, 1).then_some(())).count();
        let of_alice: usize = (100_000..100_040).map(all).sum::<usize>() + all(1000);
        assert_eq!((of_alice, all(1003)), (512, 256));
        // What one of her numbers puts back she may take with another.
        shares.put_back(100_000, 16);
        assert_eq!((shares.taken_by(100_007), all(100_039)), (496, 0));
        shares.put_back(1000, 300);
        assert!(all(100_001) > 0);
        // Root's containers are no more privileged than anybody.
        assert!(shares.room(1_000_000) < shares.room(0));
    }
}
