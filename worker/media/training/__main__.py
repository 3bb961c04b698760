from worker.media.training import main

main()
