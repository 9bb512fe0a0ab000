//! Identify data, parsed as every kind of page.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_fuzz::padded;
use onehop_proto::format;
use onehop_proto::identify::{
    self, Controller, IndependentNamespace, Namespace, NvmController, NvmNamespace, Text,
};

fuzz_target!(|bytes: &[u8]| {
    assert_eq!(Controller::parse(bytes).is_ok(), bytes.len() >= Controller::BYTES);
    let page = &padded(bytes);
    controller(page);
    namespace(page);
    lists(page);
    let nvm = NvmController::new(page);
    let _ = (nvm.vsl(), nvm.wzsl(), nvm.dmrl(), nvm.dmrsl(), nvm.dmsl());
    let independent = IndependentNamespace::new(page);
    let _ = (independent.nsattr(), independent.nstat());
});

fn text(text: Text<'_>) {
    let shown = text.to_string();
    assert!(shown.chars().all(|c| c == char::REPLACEMENT_CHARACTER || (' '..='~').contains(&c)), "{shown:?}");
    assert_eq!(text.as_str().is_some(), !shown.contains(char::REPLACEMENT_CHARACTER));
}

fn controller(page: &[u8; 4096]) {
    let id = Controller::new(page);
    [id.sn(), id.mn(), id.fr(), id.subnqn()].into_iter().for_each(text);
    for i in 0..=u8::MAX {
        let state = id.power_state(i);
        assert_eq!(state.is_some(), i < 32 && i <= id.npss_z());
        let _ = state.map(|s| (s.max_microwatts(), s.non_operational(), s.bytes()));
        let _ = (id.retry_delay_ms(i), format::max_transfer_bytes(id.mdts(), i));
    }
    assert!(id.aer_limit() >= 1 && id.abort_limit() >= 1);
    let _ = (id.oacs(), id.oncs(), id.vwc(), id.sgls(), id.log_offsets());
}

fn namespace(page: &[u8; 4096]) {
    let id = Namespace::new(page);
    let extended = NvmNamespace::new(page);
    for i in 0..=u8::MAX {
        let _ = (id.lbaf(i), extended.elbaf(i));
    }
    if let Ok(format) = id.format() {
        let blocks = id.nsze();
        let _ = (format.data_bytes(blocks), format.metadata_bytes(blocks), format.transfer_bytes(blocks));
        for most in [0, 511, 512, 4096, u64::MAX] {
            let within = format.blocks_within(most);
            assert!(format.transfer_bytes(within).is_some_and(|bytes| bytes <= most));
        }
        let _ = format::check_range(blocks, id.ncap(), id.nuse());
    }
    let _ = (id.format_index(), id.active(), id.granularities());
}

fn lists(page: &[u8; 4096]) {
    let mut again = [0; 4096];
    let active: Vec<u32> = identify::active_namespaces(page).collect();
    assert!(active.len() <= 1024 && !active.contains(&0));
    identify::build::put_active(&mut again, active.iter().copied());
    assert!(identify::active_namespaces(&again).eq(active));

    let names: Vec<_> = identify::descriptors(page).collect();
    assert!(names.len() <= 4096 / 5 + 1 && names.iter().rev().skip(1).all(Result::is_ok));
    let known: Vec<_> =
        names.into_iter().flatten().filter(|n| !matches!(n, identify::NamespaceId::Unknown { .. })).collect();
    identify::build::put_descriptors(&mut again, known.iter().copied());
    assert!(identify::descriptors(&again).flatten().eq(known));
}
