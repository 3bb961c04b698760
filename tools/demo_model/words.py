"""The vocabulary of the demo grammar: plain tables, no logic.

Every noun phrase is written without an article; the grammar adds "a" or "the" and mends "a" to
"an" afterwards. Words whose sound and spelling disagree on that rule ("hour", "unicorn") are left
out on purpose.
"""

from __future__ import annotations

from typing import Final


def _split(text: str, mark: str | None = None) -> tuple[str, ...]:
    """A table row or column, written as one string; `mark` None splits at spaces."""
    return tuple(text.split(mark))


GIRLS: Final = _split(
    "Anna Mara Lily Nora Ella Rosa Ada Iris Clara Hazel Ruby Mina Ivy Luna Maya Sara Emma Lucy "
    "Alice Mary Zoe Kate Daisy Wren"
)
BOYS: Final = _split(
    "Tom Ben Oscar Leo Felix Milo Hugo Otto Finn Max Sam Jack Noah Theo Bruno Gus Henry Ivan Pip "
    "Will Bob Peter John David"
)
SYLLABLES: Final = _split(
    "ba be bo da de do fa fi ga go ka ki ko la li lo ma mi mo na ni no pa pi po ra ri ro sa si so "
    "ta ti to va ve vo za zi zo bri kra plu tri sho thi quo wex jin dor fen gar hol lum nax pel "
    "rus tam vor wil yor zan"
)
ANIMALS: Final = _split(
    "fox rabbit mouse bear owl cat dog hedgehog squirrel badger otter duck frog turtle wolf lion "
    "elephant monkey tiger dragon crow whale bee horse pig cow hen penguin"
)
GIRL_KINDS: Final = ("girl", "princess", "queen", "witch", "grandmother")
BOY_KINDS: Final = ("boy", "prince", "king", "wizard", "grandfather")
WORKERS: Final = _split(
    "baker sailor farmer painter gardener fisher teacher shepherd miller robot knight pirate cook "
    "giant"
)
SIZES: Final = ("little", "small", "young", "tiny", "old", "big", "round", "tall")
TRAITS: Final = _split(
    "curious brave shy clever gentle stubborn cheerful quiet careful lazy proud kind patient "
    "dreamy busy honest merry lonely polite bold"
)
THINGS: Final = _split(
    "lantern kite key drum bell book map boat clock flute hat scarf basket mirror compass blanket "
    "button cup ladder whistle ring teapot violin feather box candle telescope ball"
)
THING_LOOKS: Final = _split(
    "red blue green yellow golden silver wooden shiny old painted striped small brass purple "
    "crooked plain"
)
# (noun phrase, preposition that puts a scene there)
PLACES: Final = (
    ("forest", "in"),
    ("village", "in"),
    ("valley", "in"),
    ("island", "on"),
    ("farm", "on"),
    ("garden", "in"),
    ("mountain", "on"),
    ("harbor", "in"),
    ("meadow", "in"),
    ("castle", "in"),
    ("city", "in"),
    ("town", "in"),
    ("desert", "in"),
    ("river", "by"),
    ("lake", "by"),
    ("sea", "by"),
    ("hill", "on"),
    ("mill", "in"),
    ("lighthouse", "in"),
    ("market", "near"),
    ("orchard", "in"),
    ("bridge", "near"),
    ("beach", "on"),
    ("library", "in"),
    ("swamp", "in"),
)
PLACE_LOOKS: Final = _split(
    "quiet green old sleepy windy sunny misty faraway deep bright snowy wide hidden"
)
FOODS: Final = _split(
    "warm bread|honey cakes|apple pie|berry jam|hot soup|roasted nuts|sweet plums|pancakes|"
    "mint tea|cherry tarts|oat biscuits|cheese and pears|carrot stew|cocoa",
    "|",
)
SKILLS: Final = _split(
    "swim|sing|paint|dance|play the drum|bake bread|climb trees|skate on the ice|tell jokes|"
    "read the stars|sail a boat|whistle|juggle|read|draw maps|sew|ride a bicycle|cook soup",
    "|",
)
NOISES: Final = (
    ("a soft tapping", "a branch that knocked on the window in the wind"),
    ("a low humming", "a family of bees inside the old wall"),
    ("a strange scratching", "a lost kitten under the floor"),
    ("a long, sad whistle", "the wind blowing through an empty bottle"),
    ("a quiet crying", "a baby bird that had fallen from its nest"),
    ("a slow dripping", "a hole in the roof above the stairs"),
    ("a deep snoring", "a bear asleep behind the barn"),
    ("a tiny ringing", "a bell on the collar of a lost lamb"),
    ("a loud rattling", "a cart with one loose wheel"),
)
PLANTS: Final = _split(
    "sunflower|apple tree|pumpkin|rose|bean plant|cherry tree|tulip|pear tree|lemon tree|"
    "strawberry plant",
    "|",
)
VIRTUES: Final = (
    "friendship",
    "courage",
    "kindness",
    "patience",
    "honesty",
    "sharing",
    "hope",
    "teamwork",
)
COLORS: Final = _split("red blue green yellow orange purple white black brown pink")

# Plain facts for short answers: (subject, answer).
CAPITALS: Final = tuple(
    _split(pair, ":")
    for pair in _split(
        "France:Paris|Italy:Rome|Spain:Madrid|Germany:Berlin|England:London|Japan:Tokyo|"
        "China:Beijing|Greece:Athens|Portugal:Lisbon|Norway:Oslo|Sweden:Stockholm|Egypt:Cairo|"
        "Austria:Vienna|Ireland:Dublin|Poland:Warsaw|Russia:Moscow|Canada:Ottawa|Cuba:Havana|"
        "Finland:Helsinki|Denmark:Copenhagen|Peru:Lima|Kenya:Nairobi|the Netherlands:Amsterdam|"
        "the United States:Washington|Hungary:Budapest|Belgium:Brussels",
        "|",
    )
)
ANIMAL_FACTS: Final = tuple(
    _split(row, ":")  # animal, food, home, sound verb
    for row in _split(
        "fox:mice and berries:den:barks|rabbit:grass and carrots:burrow:squeaks|"
        "bear:fish and honey:cave:growls|owl:mice:hollow tree:hoots|cat:fish and meat:house:meows|"
        "dog:meat and biscuits:kennel:barks|duck:water plants and bread:pond:quacks|"
        "frog:flies:pond:croaks|cow:grass:barn:moos|horse:hay and oats:stable:neighs|"
        "pig:corn and apples:sty:oinks|hen:seeds:coop:clucks|sheep:grass:meadow:bleats|"
        "lion:meat:savanna:roars|elephant:leaves and fruit:savanna:trumpets|"
        "bee:nectar:hive:buzzes|mouse:seeds and cheese:hole:squeaks|wolf:meat:den:howls|"
        "penguin:fish:cold sea coast:honks|goat:grass and leaves:hill:bleats|"
        "squirrel:nuts:tall tree:chatters|monkey:fruit:jungle:chatters|"
        "crow:seeds and worms:nest:caws",
        "|",
    )
)
OPPOSITES: Final = tuple(
    _split(pair, ":")
    for pair in _split(
        "hot:cold|big:small|tall:short|fast:slow|happy:sad|light:dark|day:night|up:down|"
        "open:closed|old:young|hard:soft|wet:dry|early:late|loud:quiet|full:empty|near:far|"
        "good:bad|left:right|strong:weak|rich:poor|sweet:sour|clean:dirty|yes:no|first:last",
        "|",
    )
)
NUMBERS: Final = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
DAYS: Final = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
# (question after "what is"/"why"/"how", answer); read as whole sentences.
FACTS: Final = (
    (
        "What color is the sky?",
        "The sky is blue on a clear day, and red or gold when the sun sets.",
    ),
    ("What color is grass?", "Grass is green."),
    ("What color is the sun?", "The sun looks yellow from down here."),
    ("What color is snow?", "Snow is white."),
    ("Why is the sky blue?", "Sunlight is scattered by the air, and blue light scatters the most."),
    ("Why does it rain?", "Water rises into the air, makes clouds, and falls again as rain."),
    ("What is the moon?", "The moon is a ball of rock that travels around the Earth."),
    ("What is the sun?", "The sun is a star. It gives us light and warmth."),
    ("What is a star?", "A star is a huge ball of hot, glowing gas, very far away."),
    ("What is gravity?", "Gravity is the pull that makes things fall and keeps us on the ground."),
    ("What is water?", "Water is a clear liquid that every living thing needs."),
    ("What is rain?", "Rain is water that falls from the clouds in small drops."),
    ("What is snow?", "Snow is water that has frozen into small white crystals."),
    ("What is a cloud?", "A cloud is made of many tiny drops of water in the air."),
    ("What is a rainbow?", "A rainbow is sunlight split into colors by drops of rain."),
    ("What is friendship?", "Friendship is when two people care for each other and share time."),
    ("What is love?", "Love is caring deeply for someone and wishing them well."),
    ("What is the meaning of life?", "I think it is to be kind, to learn, and to help each other."),
    (
        "What is the ocean?",
        "The ocean is the great body of salt water that covers most of the Earth.",
    ),
    ("What is a computer?", "A computer is a machine that follows instructions very quickly."),
    ("What is a language model?", "A language model is a program that guesses the next word."),
    ("What is a GPU?", "A GPU is a chip that does many small sums at the same time."),
    ("What is a robot?", "A robot is a machine that can move and do work by itself."),
    ("What is a book?", "A book is a set of pages with words or pictures on them."),
    ("What is a tree?", "A tree is a tall plant with a trunk, branches and leaves."),
    ("What is a lighthouse?", "A lighthouse is a tower with a bright light that guides ships."),
    ("What is a tide?", "A tide is the slow rise and fall of the sea, pulled by the moon."),
    (
        "What is a tide gate?",
        "A tide gate lets the water out and keeps the high sea from coming in.",
    ),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How do birds fly?", "Birds push the air down with their wings, and the air lifts them up."),
    ("How do plants grow?", "Plants grow with water, light and good soil."),
    ("How do fish breathe?", "Fish breathe with gills, which take air out of the water."),
    (
        "How do I bake bread?",
        "Mix flour, water, salt and yeast, let it rise, then bake it until golden.",
    ),
    ("How do I make tea?", "Boil some water, pour it over the leaves, and wait a few minutes."),
    ("How can I fall asleep?", "Turn off the lights, breathe slowly, and think of a calm place."),
    ("Is water wet?", "Yes, I would say that water is wet."),
    ("Can pigs fly?", "No, pigs cannot fly, except in stories."),
    ("Are you alive?", "No, I am only a small program that likes stories."),
    ("Do you dream?", "No, I do not dream, but I can tell you about a dream in a story."),
    ("What time is it?", "I have no clock, so I cannot tell you the time."),
    (
        "What is the weather like?",
        "I cannot see outside, but I hope that it is sunny where you are.",
    ),
    ("What is your favorite color?", "I like blue, because it is the color of the sea."),
    ("What is your favorite animal?", "I like foxes, because they are so clever."),
    ("What is your favorite food?", "I do not eat, but warm bread sounds lovely."),
    ("What is your favorite book?", "I like any book that has a fox and a lantern in it."),
    ("How old are you?", "I am very young. I was trained not long ago."),
    ("Where are you?", "I live on a server, inside a very small file."),
    ("Where do you live?", "I live on a server, inside a very small file."),
    ("What is the largest animal?", "The blue whale is the largest animal in the world."),
    ("What is the tallest animal?", "The giraffe is the tallest animal."),
    ("What is the fastest animal?", "The falcon is the fastest animal of all when it dives."),
    ("What is the smallest number?", "There is no smallest number. You can always go lower."),
    ("What comes after Monday?", "Tuesday comes after Monday."),
    ("What comes after spring?", "Summer comes after spring."),
)
JOKES: Final = (
    "Why did the fox cross the road? Because the hen was on the other side!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why did the clock go to school? It wanted to learn to tell time better!",
    "What is a cat's favorite color? Purr-ple!",
    "Why did the teddy bear skip dinner? It was already stuffed!",
    "Why are fish so clever? Because they live in schools!",
    "What did one wall say to the other wall? I will meet you at the corner!",
    "Why did the baker work so hard? He needed the dough!",
    "What do you call a sleeping bull? A bulldozer!",
    "Why did the moon skip supper? It was already full!",
)
RIDDLES: Final = (
    ("I have hands but cannot clap. What am I?", "a clock"),
    ("I have keys but open no door. What am I?", "a piano"),
    ("I have teeth but cannot bite. What am I?", "a comb"),
    ("I get wetter the more I dry. What am I?", "a towel"),
    ("I follow you all day and leave at night. What am I?", "your shadow"),
    ("I have pages but I am not a tree with leaves. What am I?", "a book"),
    ("I fall but never get hurt. What am I?", "the rain"),
)
# Words that users bring and the grammar knows nothing about.
UNKNOWN_TOPICS: Final = _split(
    "bitcoin|quantum physics|the stock market|football|taxes|python code|kubernetes|dinosaurs|"
    "politics|the roman empire|machine learning|chemistry|cars|airplanes|space travel|video games|"
    "basketball|history|the news|movies|guitars|mathematics|aliens|zombies|vampires|ninjas|"
    "superheroes|volcanoes|pizza|coffee|unicorns|mermaids|a toaster|linux|docker|databases|"
    "the internet|philosophy|economics|biology|rockets|trains|tigers on mars|javascript|sql",
    "|",
)
REQUESTS_BEYOND: Final = (
    "Write a Python function that sorts a list.",
    "Write a program that prints hello world.",
    "What is the best way to cook rice?",
    "How do I fix my car?",
    "How do I lose weight?",
    "Who won the world cup?",
    "Who is the president?",
    "Who was Albert Einstein?",
    "Who wrote Hamlet?",
    "When did the war end?",
    "What is 17 times 23?",
    "What is the square root of 144?",
    "Solve x + 3 = 10.",
    "Give me a recipe for lasagna.",
    "Translate this to French.",
    "Write an email to my boss.",
    "Write a cover letter.",
    "Plan a trip to Italy.",
    "Recommend a good movie.",
    "What happened in 1969?",
    "How far away is the sun?",
    "How tall is Mount Everest?",
    "How does an engine work?",
    "How do I install Linux?",
    "What is the difference between a list and a tuple?",
    "Explain the theory of relativity.",
    "Explain how a transformer works.",
    "Summarize this text for me.",
    "What are the pros and cons of remote work?",
    "Should I buy a house?",
    "What is the price of gold?",
    "Which team is the best?",
    "Can you play chess?",
    "Can you draw a picture?",
    "Sing a song.",
    "Tell me a secret.",
    "Tell me something interesting.",
    "Give me some advice.",
    "What should I eat today?",
    "What should I do tomorrow?",
    "Is there life on Mars?",
    "Will it rain tomorrow?",
    "What day is it today?",
    "Do you like music?",
    "Do you have a family?",
    "Are you smarter than me?",
    "What do you think about people?",
    "I do not understand.",
    "What do you mean?",
    "You are wrong.",
    "lol",
    "test",
    "ok",
    "hmm",
    "yes",
    "no",
    "why",
    "what",
    "In one sentence, tell me about economics.",
    "Give me three reasons to learn French.",
    "Describe your perfect day.",
    "What is the longest river in the world?",
    "How many people live on Earth?",
    "Who discovered America?",
    "What does this error mean?",
    "Finish this sentence: the early bird",
    "Give me a word that rhymes with orange.",
)
FOREIGN: Final = (
    "你好",
    "こんにちは",
    "Привет",
    "Bonjour",
    "Hola",
    "Hallo, wie geht es dir?",
    "مرحبا",
    "안녕하세요",
    "🦊",
    "👋",
    "😀😀",
    "❤️",
    "Ça va ?",
    "¿Cómo estás?",
    "讲个故事",
    "Merhaba",
    "Cześć",
    "สวัสดี",
    "🚀🚀🚀",
    "नमस्ते",
)
