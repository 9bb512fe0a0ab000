//! Systems with wrong, truncated or circular files: nothing panics, and anomalies are reported.

use onehop_doctor::{
    Diagnosis, Facts, FactsRequest, Only, Status, Style, Verdict, examine, recorded_files, render, topo,
};
use onehop_pci::{Content, Record, Root};
use proptest::prelude::*;
use serde_json::json;

use crate::machines::compose::{DOWNSTREAM, Function, MEM64, Machine, PREF64};

/// Runs everything on a system.
fn all(record: Record) -> Diagnosis {
    let root = Root::recorded(record);
    let facts =
        Facts::gather(&root, &FactsRequest { files: recorded_files(&root), ..FactsRequest::default() })
            .unwrap();
    let diagnosis = examine(&facts, &Only::default(), root.about());
    let _ = render(&diagnosis, Style { colour: true, all: true });
    let mut explanations = Vec::new();
    for gpu in &facts.gpus {
        explanations.extend(
            facts.peers().into_iter().filter_map(|device| topo::explain(&facts, gpu.address, device)),
        );
    }
    explanations.iter().for_each(|explanation| drop(topo::explain_text(explanation)));
    let (tree, page) = (
        topo::tree(&facts, true),
        topo::page(&facts, true, root.about(), &explanations, topo::missing(&facts)),
    );
    assert!(tree.len() < 1 << 20 && page.contains("</html>") && !page.contains("<script"));
    diagnosis
}

/// A GPU and a drive below a port.
fn small() -> Machine {
    let mut machine = Machine::new("small");
    machine
        .add(&Function::port("0000:00:01.0", (1, 1), DOWNSTREAM).group(1, "DMA"))
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x2330), 0x030200)
                .under(&["0000:00:01.0"])
                .bar(1, 1 << 40, 1 << 37, PREF64)
                .resizable(1, 37, 26, 37)
                .lanes((5, 16), (5, 16))
                .group(2, "DMA"),
        )
        .add(
            &Function::new("0000:02:00.0", (0x144d, 2), 0x010802)
                .under(&["0000:00:01.0"])
                .bar(0, 1 << 30, 16384, MEM64)
                .lanes((4, 4), (4, 4))
                .group(3, "DMA")
                .driver("nvme"),
        );
    machine.file("/proc/self/mountinfo", "\n");
    machine
}

#[test]
fn nothing_at_all() {
    let diagnosis = all(Record::new());
    assert!(diagnosis.routes.is_empty() && diagnosis.checks.iter().all(|check| check.status != Status::Fail));
}

#[test]
fn malformed_files() {
    let noise = [
        "",
        "\n",
        "0",
        "-1",
        "99999999999999999999999",
        "0x",
        "[",
        "a b c\0",
        "\u{1f600}",
        "<script>alert(1)</script>",
    ];
    let clean = small().0;
    for path in clean.files.keys() {
        for text in noise {
            let mut record = clean.clone();
            record.files.insert(path.clone(), Content::Text(text.into()));
            all(record);
        }
        let mut record = clean.clone();
        record.files.insert(path.clone(), Content::Denied { denied: true });
        all(record);
        let mut record = clean.clone();
        record.files.remove(path);
        all(record);
    }
}

#[test]
fn circular_links() {
    let clean = small().0;
    for path in clean.links.keys() {
        for target in [
            "",
            "/",
            "..",
            path,
            "../../../devices/pci0000:00/0000:01:00.0/0000:01:00.0",
            "pci:/0000:02:00.0",
        ] {
            let mut record = clean.clone();
            record.links.insert(path.clone(), target.into());
            all(record);
        }
    }
    // Two ports, each below the other.
    let mut machine = Machine::new("circle");
    machine.add(&Function::port("0000:00:01.0", (1, 1), DOWNSTREAM).under(&["0000:00:02.0"]));
    machine.add(&Function::port("0000:00:02.0", (1, 1), DOWNSTREAM).under(&["0000:00:01.0"]));
    all(machine.0);
}

#[test]
fn a_removed_drive_is_reported() {
    let mut machine = small();
    machine
        .0
        .files
        .insert("/sys/bus/pci/devices/0000:02:00.0/config".into(), Content::from_bytes(&[0xff; 4096]));
    let diagnosis = all(machine.0);
    let check = diagnosis.checks.iter().find(|check| check.id == "pci.garbage").unwrap();
    assert!(check.status == Status::Warn && check.found.contains("0000:02:00.0"), "{}", check.found);
}

#[test]
fn malformed_answers() {
    for answer in [json!(null), json!(7), json!({}), json!({"gpus": [{}]}), json!([1, 2])] {
        let mut machine = small();
        for question in ["cuda", "nvml", "io_uring", "identify:nvme0", "file:/x", "claimed:nvme0n1"] {
            machine.answer(question, answer.clone());
        }
        all(machine.0);
    }
}

#[test]
fn reports_of_module_and_nvml_are_not_trusted() {
    let given = || {
        let mut machine = small();
        machine.file("/sys/module/onehop/version", "1\n");
        let driver = machine.0.links.iter_mut().find(|(path, _)| path.ends_with("0000:02:00.0/driver"));
        *driver.unwrap().1 = "../../../../bus/pci/drivers/onehop".into();
        machine
    };
    let noise = ["", "nothing\n", "strict msi", "<b> \u{7} strict", &"x ".repeat(5000)];
    for words in noise {
        let mut machine = given();
        machine.file("/sys/bus/pci/devices/0000:02:00.0/onehop_missing", words);
        machine.file("/dev/onehop-0000:02:00.0", "");
        let diagnosis = all(machine.0);
        let bound = diagnosis.checks.iter().find(|check| check.id == "kernel.onehop_device").unwrap();
        assert!(bound.found.len() < 400, "{}", bound.found);
        assert_eq!(
            bound.status == Status::Pass,
            words.trim().is_empty() || words.starts_with("nothing"),
            "{words}"
        );
    }
    let without = all(given().0);
    let bound = without.checks.iter().find(|check| check.id == "kernel.onehop_device").unwrap();
    assert_eq!(bound.status, Status::Warn, "{}", bound.found);
    let answer = json!({ "error": null, "gpus": [
        { "pci": "0000:01:00.0", "link": [99, 4_000_000_000_u32], "best_link": [null, 16], "power": [4_000_000_000_u32, 0], "state": 31 },
        { "pci": "nonsense", "link": [5, 8], "best_link": [5, 16], "power": [null, null], "state": null },
    ] });
    let mut machine = small();
    machine.answer("nvml", answer);
    let diagnosis = all(machine.0);
    assert!(diagnosis.checks.iter().any(|check| check.id == "gpu.power"));
}

#[test]
fn without_the_mount_table_drive_use_is_unknown() {
    let mut machine = small();
    machine.0.files.remove("/proc/self/mountinfo");
    let diagnosis = all(machine.0);
    let used = diagnosis.checks.iter().find(|check| check.id == "drive.use").unwrap();
    assert_eq!(used.status, Status::Unknown);
}

/// A change to one entry of a record.
#[derive(Clone, Debug)]
enum Mutation {
    Remove,
    Deny,
    Text(String),
    /// The file's own text with one number in it replaced.
    Number(String),
    /// The file's own text, truncated.
    Cut(usize),
    Link(String),
    Unlink,
    Folder(Vec<String>),
    Answer(String),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let number = prop_oneof![
        Just("0".to_owned()),
        Just("-1".to_owned()),
        Just("18446744073709551615".to_owned()),
        Just("0xffffffffffffffff".to_owned()),
        Just("340282366920938463463374607431768211456".to_owned()),
        Just("1e999".to_owned()),
    ];
    let target = prop_oneof![
        ".{0,40}",
        "(\\.\\./){0,8}(devices/pci0000:00/|)(0000:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]/?){0,9}",
        "/sys/bus/pci/devices/.{0,12}",
    ];
    let json = prop_oneof![
        Just("null".to_owned()),
        Just("[]".to_owned()),
        Just("{\"Ok\":{}}".to_owned()),
        Just("{\"error\":null,\"version\":2147483647,\"gpus\":[{}]}".to_owned()),
        Just("{\"Err\":7}".to_owned()),
    ];
    prop_oneof![
        Just(Mutation::Remove),
        Just(Mutation::Deny),
        ".{0,60}".prop_map(Mutation::Text),
        number.prop_map(Mutation::Number),
        (0_usize..200).prop_map(Mutation::Cut),
        target.prop_map(Mutation::Link),
        Just(Mutation::Unlink),
        proptest::collection::vec(".{0,16}", 0..8).prop_map(Mutation::Folder),
        json.prop_map(Mutation::Answer),
    ]
}

/// The key at an index.
fn pick<V>(map: &std::collections::BTreeMap<String, V>, at: prop::sample::Index) -> Option<String> {
    (!map.is_empty()).then(|| map.keys().nth(at.index(map.len())).cloned()).flatten()
}

fn mutate(record: &mut Record, mutation: Mutation, at: prop::sample::Index) {
    let file = pick(&record.files, at);
    let own = file.as_ref().and_then(|path| match record.files.get(path) {
        Some(Content::Text(text)) => Some(text.clone()),
        _ => None,
    });
    let mut put = |content| drop(file.clone().map(|path| record.files.insert(path, content)));
    match mutation {
        Mutation::Remove => drop(file.map(|path| record.files.remove(&path))),
        Mutation::Deny => put(Content::Denied { denied: true }),
        Mutation::Text(text) => put(Content::Text(text)),
        Mutation::Number(number) => {
            let own = own.unwrap_or_default();
            let old = own
                .split(|c: char| !c.is_ascii_alphanumeric())
                .find(|word| word.starts_with(char::is_numeric));
            put(Content::Text(old.map_or(number.clone(), |old| own.replacen(old, &number, 1))));
        }
        Mutation::Cut(length) => put(Content::Text(own.unwrap_or_default().chars().take(length).collect())),
        Mutation::Link(target) => drop(pick(&record.links, at).map(|path| record.links.insert(path, target))),
        Mutation::Unlink => drop(pick(&record.links, at).map(|path| record.links.remove(&path))),
        Mutation::Folder(names) => {
            let folder = file.and_then(|path| path.rsplit_once('/').map(|(folder, _)| folder.to_owned()));
            drop(folder.map(|folder| record.folders.insert(folder, names)));
        }
        Mutation::Answer(json) => {
            let answer = serde_json::from_str(&json).unwrap();
            drop(pick(&record.answers, at).map(|question| record.answers.insert(question, answer)));
        }
    }
}

/// Checks what holds for any system: findings have fixes, and no untried route is reported to work.
fn check_invariants(diagnosis: &Diagnosis) {
    for check in &diagnosis.checks {
        let bad = matches!(check.status, Status::Fail | Status::Warn | Status::Unknown);
        assert!(!bad || check.fix.is_some(), "{} has no fix: {}", check.id, check.found);
        assert!(!check.found.is_empty() && !check.why.is_empty(), "{}", check.id);
    }
    for row in &diagnosis.routes {
        assert!(!row.reason.is_empty(), "{} {}", row.device, row.route);
        let tried = matches!(row.route, "cpu/pinned" | "cpu/cached");
        assert!(row.verdict != Verdict::Yes || tried, "{} {}: {}", row.device, row.route, row.reason);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_mutation_of_any_machine(
        which in any::<prop::sample::Index>(),
        mutations in proptest::collection::vec((mutation(), any::<prop::sample::Index>()), 1..24),
    ) {
        let mut record = which.get(&crate::machines::ALL).1().0;
        mutations.into_iter().for_each(|(mutation, at)| mutate(&mut record, mutation, at));
        // Also after a round trip through a file.
        let record = Record::parse(&record.to_bytes()).unwrap();
        check_invariants(&all(record));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_config_space(gpu in proptest::collection::vec(any::<u8>(), 0..4096), port in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let mut machine = small();
        for (address, mut bytes) in [("0000:01:00.0", gpu), ("0000:00:01.0", port)] {
            if let Some(status) = bytes.get_mut(6) {
                *status |= 0x10;
            }
            let path = format!("/sys/bus/pci/devices/{address}/config");
            machine.0.files.insert(path, Content::from_bytes(&bytes));
        }
        all(machine.0);
    }
}
