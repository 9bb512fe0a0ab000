//! What the archive would hold of every machine that doctor's tests compose, given an owner, names and numbers.

use std::fs;
use std::path::PathBuf;

use onehop_pci::{Content, Record, Root};
use serde_json::json;

use super::private::Private;
use super::{ReportStep, members, step};
use crate::commands::CommandContext;
use crate::stop::StopFlag;

/// Doctor's composed machines, which have neither names nor numbers of their own.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../doctor/fixtures");
const PCI: &str = "/sys/bus/pci/devices/";

/// The owner's words, which must not be in an archive; a drive's serial number has the drive's number behind it.
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

/// Appends to the first line of a file; one that is missing is made.
fn append(record: &mut Record, path: &str, more: &str) {
    let text = match record.files.get(path) {
        Some(Content::Text(text)) => text.trim_end().to_owned(),
        _ => String::new(),
    };
    record.files.insert(path.to_owned(), Content::Text(format!("{text}{more}\n")));
}

/// The machine, with an owner. The words that identify it are where Linux has them, and in texts that doctor repeats.
fn owned(mut record: Record) -> Record {
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
        // No drive's model or number is in what doctor and topo print, so a GPU's name says it.
        let drive = if models.is_empty() { "" } else { DRIVE };
        let beside = format!("beside nqn.1994-11.com.maker:{drive}0x, eui.{EUI}");
        gpu["name"] = json!(format!("{} of {USER} (GPU-{UUID}) {beside}", gpu["name"].as_str().unwrap()));
    }
    record
}

/// The owner's words that are in a text, in any spelling.
fn found(text: &str) -> Vec<&'static str> {
    let text = text.to_ascii_lowercase();
    let words = [HOST, SHORT_HOST, USER, MOUNT, DRIVE, BOARD, MAC, GUID, EUI, UUID];
    words.into_iter().filter(|word| text.contains(&word.to_ascii_lowercase())).collect()
}

/// What `report` runs that a recorded machine can answer.
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

/// Everything in the archive that a user of this machine would make.
fn archive(record: &Record, steps: &[ReportStep]) -> (String, u64) {
    let variable = |name: &str| match name {
        "HOME" => format!("/home/{USER}"),
        "USER" | "LOGNAME" => USER.to_owned(),
        _ => String::new(),
    };
    let mut private = Private::of(&Root::recorded(record.clone()), 1000, variable);
    steps.iter().for_each(|step| private.learn(&step.document));
    let members = members(steps, &private).unwrap();
    let texts: Vec<_> = members.iter().map(|(_, bytes)| str::from_utf8(bytes).unwrap()).collect();
    (texts.join("\n"), private.removed())
}

#[test]
fn nothing_of_the_owner_is_in_the_archive_of_a_composed_machine() {
    let mut of_all = Vec::new();
    for (name, record) in fixtures() {
        let record = owned(record);
        let steps = steps(&format!("{name}-owned"), &record);
        let before: String =
            steps.iter().map(|step| format!("{:#}\n{}\n", step.document, step.text)).collect();
        let said = found(&before);
        assert!(said.len() >= 4, "{name}: doctor and topo repeat too little to try this with: {said:?}");
        of_all.extend(said);
        let (archive, removed) = archive(&record, &steps);
        assert!(found(&archive).is_empty(), "{name}: {:?} in\n{archive}", found(&archive));
        assert!(removed > 0, "{name}");
    }
    for word in [HOST, SHORT_HOST, USER, MOUNT, DRIVE, BOARD, MAC, GUID, EUI, UUID] {
        assert!(of_all.contains(&word), "no machine repeats {word}, so nothing was tried with it");
    }
}

/// A report keeps what is known of the machine's hardware, which is not secret.
#[test]
fn what_was_found_of_a_composed_machine_is_in_its_archive() {
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
