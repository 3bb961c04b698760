// Runs what a client's script has to show: each of `checks` gets the service's URL.
export const model = "demo";

export async function run(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check(process.argv[2]);
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.error(error);
      console.log(`FAILED ${name}`);
    }
  }
  process.exit(failed);
}
