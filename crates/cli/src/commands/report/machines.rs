//! Tests the archive with the doctor's composed machines, to which identifying names and numbers are added.

use std::fs;
use std::path::PathBuf;

use onehop_pci::{Content, Record, Root};
use serde_json::json;

use super::private::Private;
use super::{ReportStep, members, step};
use crate::commands::CommandContext;
use crate::stop::StopFlag;

/// The doctor's composed machines, which contain nothing that identifies an owner.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../doctor/fixtures");
const PCI: &str = "/sys/bus/pci/devices/";

/// Identifying words, which must not be in an archive. Each drive's number is appended to its serial number.
const HOST: &str = "gpu-17.acme.example";
const SHORT_HOST: &str = "gpu-17";
const USER: &str = "lovelace";
const MOUNT: &str = "/srv/acme-weights";
const DRIVE: &str = "S6XYNS0T7018";
const BOARD: &str = "7CZ2290K1P";
const MAC: &str = "04:3f:72:a1:be:ef";
const GUID: &str = "043f:7203:00a1:beef";
const EUI: &str = "0025385b71b00c31";
const UUID: &str = "5fd4f087-86f3-7a43-b711-4771313afc50";

fn fixtures() -> Vec<(String, Record)> {
    let paths = fs::read_dir(FIXTURES).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    let all: Vec<_> =
        paths.map(|path| (name(&path), Record::parse(&fs::read(path).unwrap()).unwrap())).collect();
    assert!(all.len() >= 27, "{} composed machines", all.len());
    all
}

/// Appends to a file, which is created if it is missing.
fn append(record: &mut Record, path: &str, more: &str) {
    let text = match record.files.get(path) {
        Some(Content::Text(text)) => text.trim_end().to_owned(),
        _ => String::new(),
    };
    record.files.insert(path.to_owned(), Content::Text(format!("{text}{more}\n")));
}

/// Adds identifying words to a machine: where Linux has them, and in texts that doctor prints.
fn personalize(mut record: Record) -> Record {
    append(&mut record, "/proc/sys/kernel/hostname", HOST);
    append(&mut record, "/etc/hostname", HOST);
    append(&mut record, "/etc/machine-id", &UUID.replace('-', ""));
    append(
        &mut record,
        "/etc/passwd",
        &format!("root:x:0:0::/root:/bin/sh\n{USER}:x:1000:1000::/home/{USER}:/bin/sh"),
    );
    append(&mut record, "/sys/class/dmi/id/product_serial", BOARD);
    append(&mut record, "/sys/class/dmi/id/product_uuid", UUID);
    let product = format!(" of {HOST}, S/N {BOARD}, {UUID}, {MAC}, {GUID}");
    append(&mut record, "/sys/class/dmi/id/product_name", &product);
    let models: Vec<_> = record
        .files
        .keys()
        .filter(|path| path.starts_with(PCI) && path.ends_with("/model") && path.contains("/nvme/nvme"))
        .cloned()
        .collect();
    for (n, path) in models.iter().enumerate() {
        let folder = path.trim_end_matches("/model");
        append(&mut record, &format!("{folder}/serial"), &format!("{DRIVE}{n}   "));
        append(
            &mut record,
            &format!("{folder}/subsysnqn"),
            &format!("nqn.2014-08.org.nvmexpress:uuid:{UUID}"),
        );
        let name = folder.rsplit('/').next().unwrap();
        for point in [format!("{MOUNT}{n}"), format!("/home/{USER}/m{n}")] {
            let row = format!("\n76 1 0:76 / {point} rw - ext4 /dev/{name}n1 rw");
            append(&mut record, "/proc/self/mountinfo", &row);
        }
    }
    let gpus = record.answers.get_mut("cuda").and_then(|cuda| cuda["gpus"].as_array_mut());
    for gpu in gpus.into_iter().flatten() {
        // Doctor and topo do not print drive serial numbers, so they are added to the GPU's name.
        let drive = if models.is_empty() { "" } else { DRIVE };
        let nqn = format!("beside nqn.1994-11.com.maker:{drive}0x, eui.{EUI}");
        gpu["name"] = json!(format!("{} of {USER} (GPU-{UUID}) {nqn}", gpu["name"].as_str().unwrap()));
    }
    record
}

/// The identifying words in a text, in any case.
fn identifying_words(text: &str) -> Vec<&'static str> {
    let text = text.to_ascii_lowercase();
    let words = [HOST, SHORT_HOST, USER, MOUNT, DRIVE, BOARD, MAC, GUID, EUI, UUID];
    words.into_iter().filter(|word| text.contains(&word.to_ascii_lowercase())).collect()
}

/// The steps of `report` that work on a recorded machine.
fn steps(name: &str, record: &Record) -> Vec<ReportStep> {
    let file = std::env::temp_dir().join(format!("onehop-report-{name}-{}.json", std::process::id()));
    fs::write(&file, record.to_bytes()).unwrap();
    let context = CommandContext { stop: StopFlag::default(), json: true };
    let from = file.to_str().unwrap().to_owned();
    let lines = [("doctor", ["doctor", "--all"]), ("topo", ["topo", "--explain"])];
    let steps = lines.map(|(name, words)| {
        let line: Vec<_> =
            words.map(str::to_owned).into_iter().chain(["--from".into(), from.clone()]).collect();
        let (step, failed) = step(name, &line, &context).unwrap();
        assert!(failed.is_none(), "{:?}", step.error);
        step
    });
    fs::remove_file(&file).unwrap();
    steps.into()
}

/// All text of the archive for a user of this machine, and the number of removals.
fn archive(record: &Record, steps: &[ReportStep]) -> (String, u64) {
    let variable = |name: &str| match name {
        "HOME" => format!("/home/{USER}"),
        "USER" | "LOGNAME" => USER.to_owned(),
        _ => String::new(),
    };
    let mut private = Private::of(&Root::recorded(record.clone()), 1000, variable);
    steps.iter().for_each(|step| private.add_document(&step.document));
    let members = members(steps, &private).unwrap();
    let texts: Vec<_> = members.iter().map(|(_, bytes)| str::from_utf8(bytes).unwrap()).collect();
    (texts.join("\n"), private.removed())
}

#[test]
fn archives_contain_no_identifying_words() {
    let mut seen = Vec::new();
    for (name, record) in fixtures() {
        let record = personalize(record);
        let steps = steps(&format!("{name}-owned"), &record);
        let before: String =
            steps.iter().map(|step| format!("{:#}\n{}\n", step.document, step.text)).collect();
        let words = identifying_words(&before);
        assert!(words.len() >= 4, "{name}: doctor and topo print too few identifying words: {words:?}");
        seen.extend(words);
        let (archive, removed) = archive(&record, &steps);
        let left = identifying_words(&archive);
        assert!(left.is_empty(), "{name}: {left:?} in\n{archive}");
        assert!(removed > 0, "{name}");
    }
    for word in [HOST, SHORT_HOST, USER, MOUNT, DRIVE, BOARD, MAC, GUID, EUI, UUID] {
        assert!(seen.contains(&word), "no machine prints {word}, so its removal was not tested");
    }
}

/// Descriptions of hardware are not secret, so a report keeps them.
#[test]
fn archives_contain_all_findings() {
    for (name, record) in fixtures() {
        let steps = steps(&name, &record);
        let (archive, removed) = archive(&record, &steps);
        assert_eq!(removed, 0, "{name}: {archive}");
        for step in &steps {
            assert!(archive.contains(&step.text), "{name}: {}", step.name);
            assert!(archive.contains(&format!("{:#}", step.document)), "{name}: {}", step.name);
        }
    }
}
