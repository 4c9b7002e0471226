//! What the config says of a world's behaviour, in the words of the planner.

use nstance_config::model::Server;
use nstance_core::snapshot::Settings;

use super::BrakeSettings;

pub(super) fn settings(server: &Server) -> Settings {
    Settings {
        registration_timeout: server.garbage_collection.registration_timeout,
        deleted_record_retention: server.garbage_collection.deleted_record_retention,
        eligible_age: server.expiry.eligible_age.unwrap_or_default(),
        forced_age: server.expiry.forced_age.unwrap_or_default(),
        ondemand_age: server.expiry.ondemand_age.unwrap_or_default(),
        runaway_base: server.safety.runaway_base,
        runaway_factor: server.safety.runaway_factor,
    }
}

pub(super) fn brake_settings(server: &Server) -> BrakeSettings {
    BrakeSettings {
        min: server.safety.mass_disconnect_min,
        percent: server.safety.mass_disconnect_percent,
        window: server.safety.mass_disconnect_window,
    }
}
