//! Names of tensors, and patterns in which `*` stands for any text and `?` for any one character.
//!
//! Names without wildcards are looked up in a hash table, because frontends pass tens of thousands of them. The others
//! are compiled into sets of globs.

use std::collections::{HashMap, HashSet};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::plan::Error;

/// Patterns per set. More could exceed the limit of its automaton.
const SET: usize = 256;

/// A compiled list of patterns.
pub(crate) struct NamePatterns<'a> {
    patterns: &'a [String],
    /// Names without wildcards, each with its first index in the list.
    literals: HashMap<&'a str, usize>,
    /// The other patterns: sets of globs, with their indices in the list.
    globs: Vec<(GlobSet, Vec<usize>)>,
    /// Indices of patterns with a `?`. The globs match bytes, so for a non-ASCII name they match too much.
    by_character: Vec<usize>,
}

impl<'a> NamePatterns<'a> {
    /// Compiles a list of patterns.
    ///
    /// # Errors
    /// When a pattern is too long.
    pub fn new(patterns: &'a [String]) -> Result<Self, Error> {
        let (mut literals, mut wild, mut by_character) = (HashMap::new(), Vec::new(), Vec::new());
        for (place, pattern) in patterns.iter().enumerate() {
            if !is_wild(pattern) {
                literals.entry(pattern.as_str()).or_insert(place);
                continue;
            }
            wild.push(place);
            if pattern.contains('?') {
                by_character.push(place);
            }
        }
        let mut globs = Vec::new();
        for places in wild.chunks(SET) {
            compile(patterns, places, &mut globs)?;
        }
        Ok(Self { patterns, literals, globs, by_character })
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Whether any matches this name.
    pub fn any(&self, name: &str) -> bool {
        if self.literals.contains_key(name) {
            return true;
        }
        if !self.by_character.is_empty() && !name.is_ascii() {
            return self.first(name).is_some();
        }
        self.globs.iter().any(|(set, _)| set.is_match(name))
    }

    /// The index of the first pattern that matches this name.
    pub fn first(&self, name: &str) -> Option<usize> {
        let mut found = Vec::new();
        self.wild_matches(name, &mut found);
        found.into_iter().chain(self.literals.get(name).copied()).min()
    }

    /// Adds the indices of all patterns with wildcards that match this name.
    fn wild_matches(&self, name: &str, found: &mut Vec<usize>) {
        let by_byte = name.is_ascii();
        let mut hits = Vec::new();
        for (set, places) in &self.globs {
            set.matches_into(name, &mut hits);
            let places = hits.iter().filter_map(|hit| places.get(*hit).copied());
            found.extend(places.filter(|place| by_byte || !self.by_character.contains(place)));
        }
        if !by_byte {
            let matches = |place: &&usize| self.patterns.get(**place).is_some_and(|p| matches(p, name));
            found.extend(self.by_character.iter().filter(matches));
        }
    }

    /// The first pattern that matches none of these names. A pattern `*` requires nothing, so it is never returned.
    pub fn unmatched<'n>(&self, names: impl Iterator<Item = &'n str>) -> Option<&'a str> {
        let mut unseen: HashSet<&str> = self.literals.keys().copied().collect();
        let mut met = vec![false; self.patterns.len()];
        let mut found = Vec::new();
        for name in names {
            unseen.remove(name);
            self.wild_matches(name, &mut found);
            for place in found.drain(..) {
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

/// Compiles the patterns at these indices into one set, or into several if one would be too large.
fn compile(
    patterns: &[String],
    places: &[usize],
    globs: &mut Vec<(GlobSet, Vec<usize>)>,
) -> Result<(), Error> {
    let mut set = GlobSetBuilder::new();
    let added = places.iter().filter_map(|place| patterns.get(*place)).try_for_each(|pattern| {
        let glob = GlobBuilder::new(&as_glob(pattern)).backslash_escape(false).build()?;
        set.add(glob);
        Ok::<_, globset::Error>(())
    });
    match added.and_then(|()| set.build()) {
        Ok(set) => globs.push((set, places.to_vec())),
        Err(_) if places.len() > 1 => {
            let (one, other) = places.split_at(places.len() / 2);
            compile(patterns, one, globs)?;
            compile(patterns, other, globs)?;
        }
        Err(why) => {
            let pattern = places.first().and_then(|place| patterns.get(*place)).cloned().unwrap_or_default();
            return Err(Error::Pattern { pattern, why: why.kind().to_string() });
        }
    }
    Ok(())
}

/// The pattern in glob syntax, which has more wildcards than these two.
fn as_glob(pattern: &str) -> String {
    let mut glob = String::with_capacity(pattern.len());
    for c in pattern.chars() {
        match c {
            // Two of them would match across folders.
            '*' if glob.ends_with('*') => {}
            '[' | ']' | '{' | '}' => glob.extend(['[', c, ']']),
            _ => glob.push(c),
        }
    }
    glob
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
    fn names_and_patterns_are_told_apart() {
        let patterns = list(&["a.b", "layers.*.weight", "x?", "a.b", "[0]*", "**", "\\*{a,b}"]);
        let all = NamePatterns::new(&patterns).unwrap();
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
        let few = NamePatterns::new(&few).unwrap();
        assert_eq!(few.first("\\1{a,b}"), Some(2));
        for name in ["a.bc", "x", "xyz", "x\u{fc}\u{fc}", "\\a", ""] {
            assert_eq!((few.first(name), few.any(name)), (None, false), "{name}");
        }
    }

    #[test]
    fn a_pattern_without_a_tensor_is_found() {
        let unmatched = |patterns: &[&str], names: &[&str]| {
            let patterns = list(patterns);
            let all = NamePatterns::new(&patterns).unwrap();
            all.unmatched(names.iter().copied()).map(str::to_owned)
        };
        assert_eq!(unmatched(&["a", "b*", "a"], &["b1", "a"]), None);
        assert_eq!(unmatched(&["a", "b*", "c?"], &["b1", "a", "c"]).as_deref(), Some("c?"));
        assert_eq!(unmatched(&["a", "b*"], &["b1"]).as_deref(), Some("a"));
        assert_eq!(unmatched(&["*", "**"], &[]), None);
        assert_eq!(unmatched(&[""], &["a"]).as_deref(), Some(""));
        assert_eq!(unmatched(&["a"], &[]).as_deref(), Some("a"));
    }

    /// 32 000 names took seconds when each was compared with every tensor's; they also exceed what one set holds.
    #[test]
    fn very_many_patterns_are_matched_in_no_time() {
        let names: Vec<_> =
            (0..32_000).map(|i| format!("model.layers.{i}.self_attn.q_proj.weight")).collect();
        let start = std::time::Instant::now();
        let all = NamePatterns::new(&names).unwrap();
        assert!(names.iter().enumerate().all(|(i, name)| all.first(name) == Some(i)));
        assert_eq!(all.unmatched(names.iter().map(String::as_str)), None);
        assert!(!all.any("model.layers.32000.self_attn.q_proj.weight"));
        assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
        let patterns: Vec<_> = (0..2000).map(|i| format!("m?del.*.{i}.*.w?ight")).collect();
        let all = NamePatterns::new(&patterns).unwrap();
        assert_eq!(all.first("model.layers.1999.x.weight"), Some(1999));
        assert!(all.globs.len() > 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn globs_match_as_characters_do(
            patterns in proptest::collection::vec("[ab./*?\\[\\]{},!^\\\\\u{fc}-]{0,6}", 1..5),
            name in "[ab./*?\\[\\]{},!^\\\\\u{fc}\n-]{0,6}",
        ) {
            let all = NamePatterns::new(&patterns).unwrap();
            let first = patterns.iter().position(|pattern| matches(pattern, &name));
            prop_assert_eq!(all.first(&name), first);
            prop_assert_eq!(all.any(&name), first.is_some());
            let missing = patterns.iter().find(|p| !matches(p, &name) && p.bytes().any(|b| b != b'*') || p.is_empty() && !name.is_empty());
            prop_assert_eq!(all.unmatched([name.as_str()].into_iter()), missing.map(String::as_str));
        }
    }
}
