//! Names of tensors, and patterns in which `*` stands for any text and `?` for any one character.
//!
//! A name without either is looked up in a hash table, because frontends pass tens of thousands of them. The others, of
//! which there are few, are tried one after the other.

use std::collections::{HashMap, HashSet};

/// A list of patterns, ready to be matched.
pub(crate) struct NamePatterns<'a> {
    patterns: &'a [String],
    /// Names without wildcards, each with its first index in the list.
    literals: HashMap<&'a str, usize>,
    /// The others with their places, in the order of the list.
    wild: Vec<(Wild<'a>, usize)>,
}

impl<'a> NamePatterns<'a> {
    /// Parses them.
    pub fn new(patterns: &'a [String]) -> Self {
        let (mut literals, mut wild) = (HashMap::new(), Vec::new());
        for (place, pattern) in patterns.iter().enumerate() {
            if is_wild(pattern) {
                wild.push((Wild::new(pattern), place));
            } else {
                literals.entry(pattern.as_str()).or_insert(place);
            }
        }
        Self { patterns, literals, wild }
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Whether any matches this name.
    pub fn any(&self, name: &str) -> bool {
        self.literals.contains_key(name) || self.wild_matches(name).next().is_some()
    }

    /// The index of the first pattern that matches this name.
    pub fn first(&self, name: &str) -> Option<usize> {
        self.wild_matches(name).next().into_iter().chain(self.literals.get(name).copied()).min()
    }

    /// The places of all patterns with wildcards that match this name.
    fn wild_matches<'n>(&'n self, name: &'n str) -> impl Iterator<Item = usize> + use<'n, 'a> {
        self.wild.iter().filter(move |(wild, _)| wild.matches(name)).map(|(_, place)| *place)
    }

    /// The first pattern that matches none of these names. A pattern `*` requires nothing, so it is never returned.
    pub fn unmatched<'n>(&self, names: impl Iterator<Item = &'n str>) -> Option<&'a str> {
        let mut unseen: HashSet<&str> = self.literals.keys().copied().collect();
        let mut met = vec![false; self.patterns.len()];
        for name in names {
            unseen.remove(name);
            for place in self.wild_matches(name) {
                met.get_mut(place).into_iter().for_each(|met| *met = true);
            }
        }
        let is_missing = |(pattern, met): &(&String, bool)| {
            if is_wild(pattern) {
                !met && pattern.bytes().any(|byte| byte != b'*')
            } else {
                unseen.contains(pattern.as_str())
            }
        };
        self.patterns.iter().zip(met).find(is_missing).map(|(pattern, _)| pattern.as_str())
    }
}

/// Whether a pattern contains wildcards.
fn is_wild(pattern: &str) -> bool {
    pattern.contains(['*', '?'])
}

/// A pattern with wildcards.
enum Wild<'a> {
    /// Of `*` alone: what a name begins with, what it ends with, and what comes in between, in this order.
    Stars { head: &'a str, middle: Vec<&'a str>, tail: &'a str },
    /// One with a `?`, which stands for a character of any length.
    Characters(&'a str),
}

impl<'a> Wild<'a> {
    fn new(pattern: &'a str) -> Self {
        if pattern.contains('?') {
            return Self::Characters(pattern);
        }
        let mut parts = pattern.split('*');
        let head = parts.next().unwrap_or_default();
        let tail = parts.next_back().unwrap_or_default();
        Self::Stars { head, middle: parts.filter(|part| !part.is_empty()).collect(), tail }
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Characters(pattern) => matches(pattern, name),
            Self::Stars { head, middle, tail } => {
                let Some(rest) = name.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail)) else {
                    return false;
                };
                // The first place of each part leaves the most room for those after it.
                let after =
                    |from: usize, part: &&str| Some(from + rest.get(from..)?.find(part)? + part.len());
                middle.iter().try_fold(0, after).is_some()
            }
        }
    }
}

/// Whether a pattern matches a name, character by character.
fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    // Where to continue after a mismatch: the last `*` takes one more character.
    let mut again = None;
    loop {
        let (mut next, mut rest) = (pattern.clone(), name.clone());
        match (next.next(), rest.next()) {
            (Some('*'), _) => {
                again = Some((next.clone(), name.clone()));
                pattern = next;
            }
            (None, None) => return true,
            (Some(wanted), Some(there)) if wanted == '?' || wanted == there => (pattern, name) = (next, rest),
            _ => {
                let Some((after, from)) = &mut again else { return false };
                if from.next().is_none() {
                    return false;
                }
                (pattern, name) = (after.clone(), from.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_and_patterns_are_distinguished() {
        let patterns = list(&["a.b", "layers.*.weight", "x?", "a.b", "[0]*", "**", "\\*{a,b}"]);
        let all = NamePatterns::new(&patterns);
        for (name, first) in [
            ("a.b", Some(0)),
            ("layers.10.q/k.weight", Some(1)),
            ("xy", Some(2)),
            ("x\u{fc}", Some(2)),
            ("x\u{fc}\u{fc}", Some(5)),
            ("[0]1", Some(4)),
            ("0", Some(5)),
            ("", Some(5)),
        ] {
            assert_eq!((all.first(name), all.any(name)), (first, first.is_some()), "{name}");
        }
        let few = list(&["a.b", "x?", "\\*{a,b}"]);
        let few = NamePatterns::new(&few);
        assert_eq!(few.first("\\1{a,b}"), Some(2));
        for name in ["a.bc", "x", "xyz", "x\u{fc}\u{fc}", "\\a", ""] {
            assert_eq!((few.first(name), few.any(name)), (None, false), "{name}");
        }
    }

    #[test]
    fn a_pattern_without_a_tensor_is_found() {
        let unmatched = |patterns: &[&str], names: &[&str]| {
            let patterns = list(patterns);
            let all = NamePatterns::new(&patterns);
            all.unmatched(names.iter().copied()).map(str::to_owned)
        };
        assert_eq!(unmatched(&["a", "b*", "a"], &["b1", "a"]), None);
        assert_eq!(unmatched(&["a", "b*", "c?"], &["b1", "a", "c"]).as_deref(), Some("c?"));
        assert_eq!(unmatched(&["a", "b*"], &["b1"]).as_deref(), Some("a"));
        assert_eq!(unmatched(&["*", "**"], &[]), None);
        assert_eq!(unmatched(&[""], &["a"]).as_deref(), Some(""));
        assert_eq!(unmatched(&["a"], &[]).as_deref(), Some("a"));
    }

    /// 32 000 names took seconds when each was compared with each tensor's.
    #[test]
    fn very_many_patterns_are_matched_fast() {
        let names: Vec<_> =
            (0..32_000).map(|i| format!("model.layers.{i}.self_attn.q_proj.weight")).collect();
        let start = std::time::Instant::now();
        let all = NamePatterns::new(&names);
        assert!(names.iter().enumerate().all(|(i, name)| all.first(name) == Some(i)));
        assert_eq!(all.unmatched(names.iter().map(String::as_str)), None);
        assert!(!all.any("model.layers.32000.self_attn.q_proj.weight"));
        assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
        // Far more patterns than a frontend passes, on the names of a large model.
        let names = &names[..8000];
        let start = std::time::Instant::now();
        let patterns: Vec<_> = (0..200).map(|i| format!("model.*.{i}.*.q_proj.weight")).collect();
        let all = NamePatterns::new(&patterns);
        assert_eq!(names.iter().filter(|name| all.any(name)).count(), 200);
        assert_eq!(all.first("model.layers.199.self_attn.q_proj.weight"), Some(199));
        assert!(start.elapsed() < std::time::Duration::from_secs(4), "{:?}", start.elapsed());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn globs_match_as_characters_do(
            patterns in proptest::collection::vec("[ab./*?\\[\\]{},!^\\\\\u{fc}-]{0,6}", 1..5),
            name in "[ab./*?\\[\\]{},!^\\\\\u{fc}\n-]{0,6}",
        ) {
            let all = NamePatterns::new(&patterns);
            let first = patterns.iter().position(|pattern| matches(pattern, &name));
            prop_assert_eq!(all.first(&name), first);
            prop_assert_eq!(all.any(&name), first.is_some());
            let missing = patterns.iter().find(|p| !matches(p, &name) && p.bytes().any(|b| b != b'*') || p.is_empty() && !name.is_empty());
            prop_assert_eq!(all.unmatched([name.as_str()].into_iter()), missing.map(String::as_str));
        }
    }
}
