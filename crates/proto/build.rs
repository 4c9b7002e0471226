//! Generates the wire code from `proto/` with a compiler written in Rust: no installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "nstance/v1/types.proto",
        "nstance/v1/registration.proto",
        "nstance/v1/agent.proto",
        "nstance/v1/operator.proto",
        "google/rpc/status.proto",
    ];
    let descriptors = protox::compile(files, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), protox::prost::Message::encode_to_vec(&descriptors))?;
    // Without `transport`: clients bring their own connections (TLS 1.3 with live certificates), and the agent stays
    // free of the server half.
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::codec::Thrifty")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
